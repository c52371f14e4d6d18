// What the products of the feed-forward network have in common whose epilogues work on its hidden rows.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "anabranch/types.h"
#include "experts/hopper/row_source.h"

namespace anabranch::cuda {

// Of R rows in E groups, model width D, expert width F.
struct FfnProduct {
  const int32_t* group_sizes = nullptr;  // [E], on the device
  RowWeightSource weights;               // of the rows, and which are padding: zero in all results
  int32_t activation = 0;                // ab_activation
  int32_t dtype = 0;                     // of all matrices: AB_BFLOAT16 or AB_FLOAT16
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;  // 2: gated; 1
  int64_t F = 0;
  bool skips_rest = false;  // rows past the groups are not written
};

// Whether the kernels can count what it counts: 16-bit elements, no size 0, all indices within their types; `rows` of D
// can be read, and each of `hidden`, rows of F or nullptr, is whole 16-byte chunks.
bool fits_tensor_cores(const FfnProduct& product, const RowSource& rows, std::initializer_list<const void*> hidden);

}  // namespace anabranch::cuda
