// A warp sums a part of the rows of up to 32 / K tokens: lane i knows slot i of these tokens. Rows of all of the
// tokens are in flight together, so that a token with few rows does not wait for memory alone.
#include "dispatch/sum_tokens.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/dtype.h"
#include "dispatch/columns.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kN = 8;  // elements per access
constexpr int kVectors = 2;
constexpr int kRows = 8;  // in flight
constexpr int kResidentBlocks = 4;
using Part = Columns<kN, kVectors>;  // of a row, 1 KiB

// Each warp has an item: a part of the rows of `tokens` tokens of one place. Successive items take turns with the
// places, so that the links to all of them are busy at once.
struct Items {
  unsigned tokens;
  unsigned parts;  // of a row
  unsigned places;
  unsigned count;
};

template <class Row, class Out>
__global__ void __launch_bounds__(PartsBlock::kThreads, kResidentBlocks)
    sum_tokens(const GatherSum sum, const __grid_constant__ Places places, const Items items) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Maps& maps = sum.maps;
  const auto K = static_cast<unsigned>(maps.K);
  const int64_t width = sum.rows.D;
  const unsigned item = blockIdx.x * PartsBlock::kWarps + static_cast<unsigned>(warp_index());
  if (item >= items.count) return;
  const unsigned place = item % items.places;
  const unsigned in_place = item / items.places;
  const unsigned group = in_place / items.parts;
  const Part columns(in_place - group * items.parts, width);
  const int64_t of_place = static_cast<int64_t>(group) * items.tokens;  // the first token
  const int64_t first = place * places.T + of_place;
  const unsigned tokens = static_cast<unsigned>(min(static_cast<int64_t>(items.tokens), places.T - of_place));

  int32_t row = -1;
  float weight = 0.0f;
  if (static_cast<unsigned>(lane_index()) < tokens * K) {
    const int64_t slot = first * K + lane_index();
    row = maps.row_of_slot[slot];
    weight = sum.weights[slot];
  }
  unsigned left = __ballot_sync(kAllLanes, Maps::is_index(row, maps.R));  // the lanes whose rows are not yet added

  const Row* const from = reinterpret_cast<const Row*>(sum.rows.data) + columns.first;
  Out* to = static_cast<Out*>(places.data[place]) + of_place * width + columns.first;
  float sums[kVectors][kN] = {};
  unsigned token = 0;  // whose rows are added
  const auto end_token = [&] {
    Vectors<Out, kN, kVectors> out;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      out.vectors[v] = Vector<Out, kN>::from(sums[v]);
#pragma unroll
      for (int j = 0; j < kN; ++j) sums[v][j] = 0.0f;
    }
    out.store(to, columns.count);
    to += width;
    ++token;
  };
  const unsigned token_factor = (1u << 16) / K + 1;  // lane / K = lane * factor >> 16
  while (left != 0) {
    Vectors<Row, kN, kVectors> loaded[kRows];
    int lanes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      lanes[i] = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const int64_t from_row = __shfl_sync(kAllLanes, row, lanes[i] & (kWarp - 1));
      loaded[i].load(from + (lanes[i] < 0 ? 0 : from_row * width), lanes[i] < 0 ? 0 : columns.count);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float factor = __shfl_sync(kAllLanes, weight, lanes[i] & (kWarp - 1));
      if (lanes[i] < 0) continue;
      const unsigned owner = static_cast<unsigned>(lanes[i]) * token_factor >> 16;
      while (token < owner) end_token();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {  // round the product before the addition, as the CPU does
          sums[v][j] = __fadd_rn(sums[v][j], __fmul_rn(factor, loaded[i][v][j]));
        }
      }
    }
  }
  while (token < tokens) end_token();
}

template <class Row, class Out>
ab_status launch_sums(const GatherSum& sum, const Places& places, cudaStream_t stream) {
  const int64_t tokens = kWarp / sum.maps.K;
  const int64_t parts = Part::parts(sum.rows.D);
  const int64_t count = (places.T + tokens - 1) / tokens * parts * places.count;
  AB_RETURN_IF_ERROR(check_blocks("combine", count));
  const Items items{static_cast<unsigned>(tokens), static_cast<unsigned>(parts), static_cast<unsigned>(places.count),
                    static_cast<unsigned>(count)};
  const int64_t blocks = (count + PartsBlock::kWarps - 1) / PartsBlock::kWarps;
  return launch("combine", sum_tokens<Row, Out>, {blocks, PartsBlock::kThreads, 0, stream, true}, sum, places, items);
}

}  // namespace

bool fits_token_sums(int64_t K, int64_t D, int32_t dtype_of_rows, int32_t dtype_of_sums) {
  return K > 0 && K <= kWarp && D % kN == 0 && dtype_size(dtype_of_rows) == 2 && dtype_size(dtype_of_sums) == 2;
}

ab_status compute_token_sums(const GatherSum& sum, const Places& places, cudaStream_t stream) {
  if (sum.rows.D == 0 || sum.maps.T == 0) return ok();
  return with_float_type(sum.rows.dtype, [&]<class Row>(Row) {
    return with_float_type(sum.out.dtype, [&]<class Out>(Out) {
      if constexpr (sizeof(Row) == 2 && sizeof(Out) == 2) return launch_sums<Row, Out>(sum, places, stream);
      return AB_INVALID("combine: got dtypes of %zu and %zu bytes, expected 2", sizeof(Row), sizeof(Out));
    });
  });
}

}  // namespace anabranch::cuda
