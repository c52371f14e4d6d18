// What the random calls of GEMMs and of the expert MLP share.
#pragma once

#include "anabranch/experts.h"
#include "calls.h"

namespace anabranch::fuzz {

// Whether and how a call has packed weights. The callers pass a copy of the random numbers, so that calls with plain
// weights stay as they were.
inline bool has_large_plain_weights(Random random) { return random.chance(0.15); }
inline bool packs_a_weight(Random& random) { return random.chance(0.4); }

// Packs a weight, whose axes have this order in memory, if its sizes allow it: as MXFP4, or as FP8 blocks unless
// `mxfp4` is set. Adds the scales.
void pack_weight(const char* scales_name, const ab_tensor** scales, Random& random, bool mxfp4, const Shape& order,
                 const ab_tensor* weight, Call* call);

// Chooses the precision, and sizes that the precision allows.
template <class Args>
Sizes choose_precision(Random& random, Args* args, Call* call) {
  call->has_infinities = false;  // an infinite float32 operand gives NaN on some GPUs (cuda.h)
  if (kEmulated || random.chance(0.7)) {
    args->precision = static_cast<int32_t>(random.between(0, 1));
    return Sizes(random);
  }
  if (has_large_plain_weights(random)) return Sizes::quantizable(random);
  args->precision = AB_PRECISION_FP8;
  args->fp8_scales = static_cast<int32_t>(random.between(0, 1));
  return Sizes::quantizable(random);
}

// Sets the strides of a tensor whose axes have this order in memory, outermost first.
void set_order(const Shape& order, Operand* operand);

// Whether a call has an adapter, its rank, and how many factors it has for E experts. The callers pass a copy of the
// random numbers, so that calls without an adapter stay as they were.
inline bool has_adapter(Random& random) { return random.chance(0.3); }
inline int64_t any_rank(Random& random) { return random.one_of<int64_t>({1, 2, 5, 16, 70}); }
inline int64_t any_sharing(Random& random, int64_t E) { return random.chance(0.3) ? 1 : E; }

// Adds a factor of the dtype of the rows or float32, in any memory order. Experts may share it through a stride of 0.
void add_factor(const char* name, const ab_tensor** field, Random& random, int32_t dtype, const Shape& shape,
                Call* call);

}  // namespace anabranch::fuzz
