// Column layouts of intermediate rows that kernels are instantiated for.
#pragma once

#include "experts/check.h"

namespace anabranch::cuda::hopper {

// plain: ungated. gated: gate and up in two parts. interleaved: gate and up columns alternate.
enum class HiddenColumns { plain, gated, interleaved };

constexpr int parts_of(HiddenColumns columns) { return columns == HiddenColumns::plain ? 1 : 2; }

inline HiddenColumns hidden_columns_of(const FfnSizes& s) {
  if (s.P == 1) return HiddenColumns::plain;
  return s.layout.interleaved ? HiddenColumns::interleaved : HiddenColumns::gated;
}

}  // namespace anabranch::cuda::hopper
