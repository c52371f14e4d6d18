// Column layouts of intermediate rows that kernels are instantiated for.
#pragma once

#include "experts/check.h"

namespace anabranch::cuda::hopper {

// gated: gate and up in two parts. interleaved: gate and up columns alternate.
enum class GateUpLayout { ungated, gated, interleaved };

constexpr int parts_of(GateUpLayout layout) { return layout == GateUpLayout::ungated ? 1 : 2; }

inline GateUpLayout gate_up_layout_of(const FfnSizes& s) {
  if (s.P == 1) return GateUpLayout::ungated;
  return s.layout.interleaved ? GateUpLayout::interleaved : GateUpLayout::gated;
}

}  // namespace anabranch::cuda::hopper
