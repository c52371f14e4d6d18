// Tensors that own their memory, and calls with a workspace of the exact size.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "anabranch/types.h"

namespace anabranch::testing {

template <class T>
constexpr int32_t kDtypeOf = 0;
template <>
inline constexpr int32_t kDtypeOf<float> = AB_FLOAT32;
template <>
inline constexpr int32_t kDtypeOf<int16_t> = AB_INT16;
template <>
inline constexpr int32_t kDtypeOf<int32_t> = AB_INT32;
template <>
inline constexpr int32_t kDtypeOf<int64_t> = AB_INT64;
template <>
inline constexpr int32_t kDtypeOf<uint8_t> = AB_UINT8;
template <>
inline constexpr int32_t kDtypeOf<uint16_t> = AB_BFLOAT16;

// Memory starts as 0xff bytes: NaN in every float dtype, -1 in every signed integer dtype.
template <class T>
class Tensor {
 public:
  explicit Tensor(std::vector<int64_t> shape, int32_t dtype = kDtypeOf<T>) {
    view_.dtype = dtype;
    view_.rank = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) view_.shape[i] = shape[i];
    size_ = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    memory_.resize(static_cast<size_t>(size_));
    if (size_ > 0) std::memset(memory_.data(), 0xff, memory_.size() * sizeof(T));
    view_.data = memory_.data();
  }
  Tensor(std::vector<int64_t> shape, const std::vector<T>& values, int32_t dtype = kDtypeOf<T>)
      : Tensor(std::move(shape), dtype) {
    EXPECT_EQ(values.size(), memory_.size());
    memory_ = values;
    view_.data = memory_.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const ab_tensor* view() const { return &view_; }
  ab_tensor* mutable_view() { return &view_; }
  const std::vector<T>& values() const { return memory_; }
  std::vector<T>& values() { return memory_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return memory_[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const { return memory_[static_cast<size_t>(i)]; }

 private:
  ab_tensor view_{};
  int64_t size_ = 0;
  std::vector<T> memory_;
};

// Calls an operation with a workspace of exactly the requested size, filled with NaN.
template <class Args>
ab_status call(ab_status (*function)(const Args*, const ab_exec*),
               ab_status (*workspace)(const Args*, const ab_exec*, size_t*), const Args& args, int32_t threads = 0) {
  ab_exec exec{sizeof(ab_exec), threads, nullptr, nullptr, 0};
  if (workspace == nullptr) return function(&args, &exec);
  const ab_status status = workspace(&args, &exec, &exec.workspace_size);
  if (status.code != AB_OK) return status;
  // Allocate the exact size, so that AddressSanitizer detects an access one byte past it.
  std::unique_ptr<void, void (*)(void*)> memory(nullptr, std::free);
  if (exec.workspace_size > 0) {
    void* aligned = nullptr;
    EXPECT_EQ(posix_memalign(&aligned, 64, exec.workspace_size), 0);
    memory.reset(aligned);
    std::memset(aligned, 0xff, exec.workspace_size);
  }
  exec.workspace = memory.get();
  return function(&args, &exec);
}

#define EXPECT_OK(expression)                                \
  do {                                                       \
    const ab_status ab_status_ = (expression);               \
    EXPECT_EQ(ab_status_.code, AB_OK) << ab_status_.message; \
  } while (false)

// Expects the call to return expected_code and a message that contains `text`.
#define EXPECT_REFUSED(expression, expected_code, text)                              \
  do {                                                                               \
    const ab_status ab_status_ = (expression);                                       \
    EXPECT_EQ(ab_status_.code, expected_code) << ab_status_.message;                 \
    EXPECT_NE(std::strstr(ab_status_.message, text), nullptr) << ab_status_.message; \
  } while (false)

}  // namespace anabranch::testing
