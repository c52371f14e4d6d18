// Argument checks of packed weights.
#pragma once

#include "anabranch/experts.h"
#include "core/tensor.h"
#include "experts/packed_value.h"

namespace anabranch {

// Sizes of packed weights [M, N, C].
struct PackedSizes {
  int64_t M = 0;
  int64_t N = 0;
  int64_t C = 0;
};

inline bool is_packed(const ab_tensor* weights) {
  return weights != nullptr && (weights->dtype == AB_FLOAT4_E2M1X2 || weights->dtype == AB_FLOAT8_E4M3);
}

ab_status check(const ab_pack_mxfp4_args* args, PackedSizes* sizes);
ab_status check(const ab_unpack_args* args, PackedSizes* sizes);

// Requires an axis of packed weights to consist of whole blocks.
ab_status check_packed_axis(const char* name, const char* axis, int64_t size, int64_t block);

// Checks the scales of packed weights. shape: the axes of the scales. order: the memory order of the weights' axes.
ab_status check_block_scales(const char* name, const ab_tensor* scales, int32_t packed_dtype,
                             std::initializer_list<Axis> shape, const Order& order);

}  // namespace anabranch
