// Cuts a workspace into arrays. Run once without memory, it tells how much is needed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"

namespace anabranch {

class Workspace {
 public:
  explicit Workspace(const ab_exec* exec = nullptr)
      : base_(exec == nullptr ? nullptr : static_cast<char*>(exec->workspace)) {}

  // Room for `count` elements, 64-byte aligned; nullptr when there is no memory or count is 0.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  void* take_bytes(size_t bytes) {
    void* start = base_ == nullptr || bytes == 0 ? nullptr : base_ + size_;
    size_ += (bytes + 63) / 64 * 64;
    return start;
  }

  size_t size() const { return size_; }

 private:
  char* base_;
  size_t size_ = 0;
};

}  // namespace anabranch
