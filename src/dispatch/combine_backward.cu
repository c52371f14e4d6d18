// ab_cuda_combine_backward: the warps of a token read the token and its rows once, write the gradient of the rows, and
// add their shares of the dot products in a fixed order.
#include "anabranch/cuda.h"
#include "core/cuda/named_barrier.cuh"
#include "core/entry.h"
#include "core/range.h"
#include "dispatch/slots.cuh"
#include "dispatch/spread.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kMaxWarps = 8;        // per block
constexpr int kResidentBlocks = 3;  // per SM: 80 registers per thread

// A token is processed by a team of `warps` warps of a block: one per part, up to kMaxWarps. If there are more
// parts, the team makes several passes over the row.
struct Teams {
  int warps;   // per token
  int tokens;  // per block
  int passes;

  explicit Teams(int64_t parts)
      : warps(static_cast<int>(std::min<int64_t>(parts, kMaxWarps))),
        tokens(kMaxWarps / warps),
        passes(static_cast<int>((parts + warps - 1) / warps)) {}
  int threads() const { return tokens * warps * kWarp; }

  // Synchronises the warps of one token.
  __device__ __forceinline__ void sync(int team) const {
    if (warps == 1) {
      __syncwarp();
    } else {
      sync_some_warps(team + 1, warps);
    }
  }
};

// products[slot] = <x[t], other[row]>; with kWrites also to[row] = weights[slot] * x[t], where all three have one
// dtype.
template <class X, class Row, int N, bool kWrites>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kResidentBlocks)
    multiply_rows(const Spread spread, const SpreadGrid grid, const Teams teams) {
  constexpr int kRows = kRowsInFlight<N * sizeof(Row)>;
  __shared__ int32_t rows[kMaxWarps][SlotList::kCapacity];
  __shared__ int32_t slots[kMaxWarps][SlotList::kCapacity];
  __shared__ float products[kMaxWarps][SlotList::kCapacity];  // partial products of each warp's columns
  wait_for_previous_kernel();
  let_next_kernel_start();
  if constexpr (kWrites) {
    if (blockIdx.x < grid.clearing) {
      clear_rows<X, N>(spread, grid);
      return;
    }
  }
  const Maps& maps = spread.maps;
  const int warp = warp_index();
  const int team = warp / teams.warps;
  const int member = warp - team * teams.warps;
  const int64_t t = (blockIdx.x - grid.clearing) * teams.tokens + team;
  if (t >= maps.T) return;

  const auto multiply = [&](int pass, int begin, int end) {
    const Columns<N> columns(static_cast<int64_t>(pass) * teams.warps + member, grid.width);
    const Row* from = reinterpret_cast<const Row*>(spread.other.data) + columns.first;
    Vectors<X, N> x;
    x.load(reinterpret_cast<const X*>(spread.x.data) + t * grid.width + columns.first, columns.count);
    // Each lane holds the weight of one entry, and the slot that owns its row.
    float weights = 0.0f;
    int32_t owners = -1;
    if (kWrites && begin + lane_index() < end) {
      weights = spread.weights[slots[warp][begin + lane_index()]];
      owners = maps.slot_of_row[rows[warp][begin + lane_index()]];
    }
    for (int first = begin; first < end; first += kRows) {
      Vectors<Row, N> loaded[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool in_bounds = first + i < end;
        loaded[i].load(from + (in_bounds ? rows[warp][first + i] * grid.width : 0), in_bounds ? columns.count : 0);
      }
      x.forget();  // otherwise the compiler converts x before the loop, and waits for it before it loads any row
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int entry = first + i;
        const float weight = __shfl_sync(kAllLanes, weights, entry - begin);
        const int32_t owner = __shfl_sync(kAllLanes, owners, entry - begin);
        if (entry >= end) continue;
        float product = 0.0f;
#pragma unroll
        for (int v = 0; v < Columns<N>::kVectors; ++v) {
          if (v >= columns.count) continue;
#pragma unroll
          for (int j = 0; j < N; ++j) product = fmaf(x[v][j], loaded[i][v][j], product);
        }
        product = sum_lanes<kWarp>(product);
        if (lane_index() == 0) products[warp][entry] = pass == 0 ? product : products[warp][entry] + product;
        if constexpr (kWrites) {
          X* to = reinterpret_cast<X*>(spread.to.data) + rows[warp][entry] * grid.width + columns.first;
          scaled<X>(x, weight).store(to, owner == slots[warp][entry] ? columns.count : 0);
        }
      }
    }
  };
  list_slots(
      maps, t,
      [&](int32_t slot, int32_t row) {
        const bool has_row = Maps::is_index(row, maps.R);
        if (!has_row && member == 0) spread.products.set(slot, 0.0f);
        return has_row;
      },
      [&](int place, int32_t slot, int32_t row) {
        rows[warp][place] = row;
        slots[warp][place] = slot;
      },
      [&](int count) {
        for (int begin = 0; begin < count; begin += kWarp) {
          for (int pass = 0; pass < teams.passes; ++pass) multiply(pass, begin, std::min(begin + kWarp, count));
        }
        teams.sync(team);
        for (int i = member * kWarp + lane_index(); i < count; i += teams.warps * kWarp) {
          float product = 0.0f;
          for (int w = 0; w < teams.warps; ++w) product += products[team * teams.warps + w][i];
          spread.products.set(slots[warp][i], product);
        }
        teams.sync(team);
      });
}

template <class X, class Row, int N, bool kWrites>
ab_status launch_products(const Spread& spread, cudaStream_t stream) {
  const int64_t width = spread.x.D;
  const SpreadGrid grid{width, 1, kWrites ? SpreadGrid::clearing_blocks(spread) : 0};
  const Teams teams(Columns<N>::parts(width));
  const int64_t blocks = grid.clearing + (spread.maps.T + teams.tokens - 1) / teams.tokens;
  return launch("combine_backward", multiply_rows<X, Row, N, kWrites>, {blocks, teams.threads(), 0, stream, true},
                spread, grid, teams);
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::combine_backward);
  Spread spread;
  AB_RETURN_IF_ERROR(check_combine_backward(args, &spread));
  const cudaStream_t stream = cuda::stream_of(exec);
  if (spread.products.data == nullptr) return cuda::launch_spread(spread, stream);
  // One kernel writes both gradients if all dtypes are equal, as in training.
  const auto& [maps, x, weights, to, other, products] = spread;
  const bool together = to.data != nullptr && to.dtype == x.dtype && to.dtype == other.dtype &&
                        cuda::address(to.data) % cuda::kAccessBytes == 0;
  AB_RETURN_IF_ERROR(
      cuda::with_row_types(x, other, [&]<class X, class Row, int N>(X, Row, std::integral_constant<int, N>) {
        if constexpr (std::is_same_v<X, Row>) {
          if (together) return cuda::launch_products<X, Row, N, true>(spread, stream);
        }
        return cuda::launch_products<X, Row, N, false>(spread, stream);
      }));
  return together ? ok() : cuda::launch_spread(spread, stream);
}
