// Memory of a tensor that detects out-of-bounds accesses: by AddressSanitizer, or by two guard zones that detect
// writes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace anabranch::fuzz {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 256;
#endif

class Memory {
 public:
  // Allocates `bytes` bytes that start `shift` bytes after an aligned address.
  void allocate(size_t bytes, size_t shift) {
    begin_ = kGuard + shift;
    end_ = begin_ + bytes;
    memory_.reset(static_cast<char*>(std::malloc(end_ + kGuard)));
    std::fill_n(memory_.get(), begin_, kPattern);
    std::fill_n(memory_.get() + end_, kGuard, kPattern);
  }
  char* data() const { return memory_ == nullptr ? nullptr : memory_.get() + begin_; }
  bool is_intact() const {
    if (memory_ == nullptr) return true;
    const auto is_pattern = [](char byte) { return byte == kPattern; };
    return std::all_of(memory_.get(), memory_.get() + begin_, is_pattern) &&
           std::all_of(memory_.get() + end_, memory_.get() + end_ + kGuard, is_pattern);
  }

 private:
  static constexpr char kPattern = 0x5a;
  std::unique_ptr<char, void (*)(void*)> memory_{nullptr, std::free};
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace anabranch::fuzz
