// Division by a number that the host knows, as a multiplication and a shift on the device.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace anabranch::cuda {

// Computes n / d for 0 <= n < 2^31 and 1 <= d < 2^31. With 2^(s-1) < d <= 2^s and m = floor(2^(31+s) / d) + 1 < 2^32, n
// m exceeds 2^(31+s) n / d by at most n 2^s < 2^(31+s), which is too little to reach the next multiple of d.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int32_t d) {
    int s = 0;
    while ((int64_t{1} << s) < d) ++s;
    shift_ = static_cast<uint32_t>(31 + s);
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << shift_) / static_cast<uint64_t>(d) + 1);
  }

  AB_INLINE int32_t quotient(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier_ >> shift_);
  }

 private:
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace anabranch::cuda
