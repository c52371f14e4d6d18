// How the columns of a hidden row stand: what of the weights' layouts kernels are built for.
#pragma once

#include "experts/check.h"

namespace anabranch::cuda::hopper {

// Of ungated experts; gate's and up's side by side; alternating.
enum class HiddenColumns { plain, gated, interleaved };

constexpr int parts_of(HiddenColumns columns) { return columns == HiddenColumns::plain ? 1 : 2; }

inline HiddenColumns hidden_columns_of(const FfnSizes& s) {
  if (s.P == 1) return HiddenColumns::plain;
  return s.layout.interleaved ? HiddenColumns::interleaved : HiddenColumns::gated;
}

}  // namespace anabranch::cuda::hopper
