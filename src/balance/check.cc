#include "balance/check.h"

#include <algorithm>

namespace anabranch {

ab_status check_statistics(const char* name, const ab_tensor* tensor, Dtypes dtypes, int64_t T, int64_t E,
                           int64_t* sequences) {
  *sequences = 1;
  if (tensor == nullptr || tensor->rank != 2) return check_tensor(name, tensor, dtypes, {{"E", E}});
  AB_RETURN_IF_ERROR(check_tensor(name, tensor, dtypes, {{"B"}, {"E", E}}));
  const int64_t B = tensor->shape[0];
  if (B == 0 ? T != 0 : T % B != 0) {
    return AB_INVALID("%s: got %lld sequences for %lld tokens, expected a divisor of the number of tokens", name,
                      static_cast<long long>(B), static_cast<long long>(T));
  }
  *sequences = B;
  return ok();
}

namespace {

// sum[b, e] = sum over the blocks of sequence b, in order, of partial[block, e]; a strip of columns at a time.
template <class Total, class T>
void add_blocks(const T* partial, const TokenBlocks& blocks, int64_t E, T* sum) {
  constexpr int64_t kStrip = 64;
  for (int64_t b = 0; b < blocks.sequences; ++b) {
    const T* first = partial + b * blocks.blocks_per_sequence * E;
    for (int64_t begin = 0; begin < E; begin += kStrip) {
      const int64_t width = std::min(kStrip, E - begin);
      Total total[kStrip] = {};
      for (int64_t i = 0; i < blocks.blocks_per_sequence; ++i) {
        for (int64_t e = 0; e < width; ++e) total[e] += static_cast<Total>(first[i * E + begin + e]);
      }
      for (int64_t e = 0; e < width; ++e) sum[b * E + begin + e] = static_cast<T>(total[e]);
    }
  }
}

}  // namespace

void add_block_sums(const float* partial, const TokenBlocks& blocks, int64_t E, float* sum) {
  add_blocks<double>(partial, blocks, E, sum);
}

void add_block_counts(const int32_t* partial, const TokenBlocks& blocks, int64_t E, int32_t* sum) {
  add_blocks<int32_t>(partial, blocks, E, sum);
}

}  // namespace anabranch
