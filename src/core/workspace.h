// Divides a workspace into arrays. Without memory it measures the required size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "core/tensor.h"

namespace anabranch {

class Workspace {
 public:
  explicit Workspace(const ab_exec* exec = nullptr)
      : base_(exec == nullptr ? nullptr : static_cast<char*>(exec->workspace)) {}

  // An array of `count` elements, 64-byte aligned; nullptr without memory or if count is 0.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  // An array [rows, columns] of a dtype.
  void* take_rows(int64_t rows, int64_t columns, int32_t dtype) {
    size_t bytes = 0;
    const bool wraps =
        __builtin_mul_overflow(rows, columns, &bytes) || __builtin_mul_overflow(bytes, dtype_size(dtype), &bytes);
    return take_bytes(wraps ? kTooMuch : bytes);
  }

  void* take_bytes(size_t bytes) {
    void* start = base_ == nullptr || bytes == 0 ? nullptr : base_ + size_;
    size_ = std::min(size_ + (std::min(bytes, kTooMuch) + 63) / 64 * 64, kTooMuch);
    return start;
  }

  // The required size in bytes; larger than kMaxBytes if the sizes exceed any memory.
  size_t size() const { return size_; }

 private:
  static constexpr size_t kTooMuch = static_cast<size_t>(kMaxBytes) + 64;

  char* base_;
  size_t size_ = 0;
};

}  // namespace anabranch
