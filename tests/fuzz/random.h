// Random choices determined by one seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace anabranch::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // SplitMix64 (Steele, Lea and Flood, 2014).
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // low <= result <= high
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return static_cast<double>(bits() >> 11) * 0x1p-53 < probability; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[bits() % values.size()];
  }

 private:
  uint64_t state_;
};

}  // namespace anabranch::fuzz
