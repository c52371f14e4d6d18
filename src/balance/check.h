// Checks and sums of the statistics of the router and of the load balance: [E], or [B, E] with one row per sequence.
#pragma once

#include "balance/token_blocks.h"
#include "core/tensor.h"

namespace anabranch {

// Checks a tensor of statistics over T tokens. Sets *sequences to B, or to 1 for a tensor [E].
ab_status check_statistics(const char* name, const ab_tensor* tensor, Dtypes dtypes, int64_t T, int64_t E,
                           int64_t* sequences);

// sum[b, e] = sum over the blocks of sequence b, in order and in float64, of partial[block, e].
void add_block_sums(const float* partial, const TokenBlocks& blocks, int64_t E, float* sum);

// Like add_block_sums, for int32 counts, which are exact.
void add_block_counts(const int32_t* partial, const TokenBlocks& blocks, int64_t E, int32_t* sum);

}  // namespace anabranch
