// Allocates 64-byte aligned arrays in a thread's scratch memory. Without memory it only measures.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anabranch {
namespace {

class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace anabranch
