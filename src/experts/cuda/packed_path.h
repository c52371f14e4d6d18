// Chooses the kernels for a GEMM with packed weights.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "experts/cuda/ops/packed.h"

namespace anabranch::cuda {

// In the order in which they are tried.
enum class PackedPath {
  hopper,    // the producer decodes (hopper/packed_products.h), for bfloat16 on compute capability 9.0
  few_rows,  // decoded in registers, for sizes that reads_packed() accepts
  unpacked   // unpacked into scratch memory (MaybePacked), then the GEMMs of plain weights
};

// ANABRANCH_CUDA_PACKED=always in the environment, read once, takes `hopper` for any number of rows; `never` excludes
// it. Returns AB_UNSUPPORTED if the variable has another value.
ab_status choose_path(const PackedUp& up, const Device& device, PackedPath* path);
ab_status choose_path(const PackedIntermediateGradient& gradient, const Device& device, PackedPath* path);
ab_status choose_path(const PackedRowsProduct& product, const Device& device, PackedPath* path);

}  // namespace anabranch::cuda
