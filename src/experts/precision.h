// Precision of the expert GEMMs.
#pragma once

#include <cstdint>

#include "anabranch/experts.h"

namespace anabranch {

// ab_precision after the argument checks.
enum class Precision : int32_t { highest = AB_PRECISION_HIGHEST, tf32 = AB_PRECISION_TF32, fp8 = AB_PRECISION_FP8 };

template <class Args>
Precision precision_of(const Args& args) {
  return static_cast<Precision>(args.precision);
}

template <class Args>
bool is_fp8(const Args& args) {
  return args.precision == AB_PRECISION_FP8;
}

}  // namespace anabranch
