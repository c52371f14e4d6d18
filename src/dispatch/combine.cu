// ab_cuda_combine: each warp sums one part of a token in registers over the rows of the token's slots, then adds the
// same part of the addend.
#include "dispatch/combine.h"

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "dispatch/columns.cuh"
#include "dispatch/slots.cuh"

namespace anabranch::cuda {
namespace {

// Blocks per SM. This leaves 96 registers per thread, for sums, two rows in flight and addresses.
constexpr int kResidentBlocks = 5;

// Prefetches the lane's part of addend[t]; `from` points at its first column.
template <int N, int kVectors, class Addend>
__device__ __forceinline__ void prefetch_addend(const Addend* from, int count) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) prefetch_if(v < count, from + v * Columns<N>::kStep);
}

// Adds the lane's part of addend[t]. The vectors have as many elements as those of the sums, and are loaded up to 16
// bytes at a time.
template <int N, int kVectors, class Addend>
__device__ __forceinline__ void add_addend(const Addend* from, int count, float (&sums)[kVectors][N]) {
  constexpr int kElements = std::min<int>(N, kAccessBytes / sizeof(Addend));
  Vector<Addend, kElements> loaded[kVectors][N / kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < N / kElements; ++i) {
      loaded[v][i].load_if(v < count, from + v * Columns<N>::kStep + i * kElements);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[v][j] = __fadd_rn(sums[v][j], loaded[v][j / kElements][j % kElements]);
  }
}

// kVectors: per lane and row. Narrow rows have fewer, of more rows at a time.
template <class Row, class Out, int N, int kVectors>
__global__ void __launch_bounds__(PartsBlock::kThreads, kResidentBlocks)
    sum_rows(const GatherSum sum, const int64_t parts) {
  constexpr int kRows = kRowsInFlight<N * sizeof(Row)> * Columns<N>::kVectors / kVectors;
  __shared__ int32_t rows[PartsBlock::kWarps][SlotList::kCapacity];
  __shared__ int32_t slots[PartsBlock::kWarps][SlotList::kCapacity];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Maps& maps = sum.maps;
  const int64_t width = sum.rows.D;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * PartsBlock::kWarps + warp_index();
  const int64_t t = item / parts;
  if (t >= maps.T) return;
  const Columns<N, kVectors> columns(item - t * parts, width);
  const Row* from = reinterpret_cast<const Row*>(sum.rows.data) + columns.first;
  const int warp = warp_index();
  float sums[kVectors][N] = {};

  // Calls f with the lane's first column of addend[t].
  const auto with_addend = [&](const auto& f) {
    if (sum.addend.data == nullptr) return;
    with_float_type(sum.addend.dtype, [&]<class Addend>(Addend) {
      f(reinterpret_cast<const Addend*>(sum.addend.data) + t * sum.addend.D + columns.first);
    });
  };
  // Only prefetch the addend: the sums and the rows in flight leave no registers for it.
  with_addend([&](const auto* from) { prefetch_addend<N, kVectors>(from, columns.count); });

  const auto add_rows = [&](int begin, int end, float weights) {
    for (; begin < end; begin += kRows) {
      Vectors<Row, N, kVectors> loaded[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool in_bounds = begin + i < end;
        loaded[i].load(from + (in_bounds ? rows[warp][begin + i] * width : 0), in_bounds ? columns.count : 0);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float weight = __shfl_sync(kAllLanes, weights, begin + i);
        if (begin + i >= end) continue;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int j = 0; j < N; ++j) {  // round the product before the addition, as the CPU does
            sums[v][j] = __fadd_rn(sums[v][j], __fmul_rn(weight, loaded[i][v][j]));
          }
        }
      }
    }
  };
  list_slots(
      maps, t, [&](int32_t, int32_t row) { return Maps::is_index(row, maps.R); },
      [&](int place, int32_t slot, int32_t row) {
        rows[warp][place] = row;
        slots[warp][place] = slot;
      },
      [&](int count) {
        for (int begin = 0; begin < count; begin += kWarp) {  // each lane holds the weight of one entry
          const int entry = begin + lane_index();
          add_rows(begin, std::min(begin + kWarp, count), entry < count ? sum.weights[slots[warp][entry]] : 0.0f);
        }
      });

  with_addend([&](const auto* from) { add_addend<N, kVectors>(from, columns.count, sums); });

  Vectors<Out, N, kVectors> out;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) out.vectors[v] = Vector<Out, N>::from(sums[v]);
  out.store(reinterpret_cast<Out*>(sum.out.data) + t * sum.out.D + columns.first, columns.count);
}

template <class Row, class Out, int N, int kVectors = Columns<N>::kVectors>
ab_status launch_sum(const GatherSum& sum, cudaStream_t stream) {
  if constexpr (N == kAccessBytes / 2 && kVectors == Columns<N>::kVectors) {  // 16 bits
    if (sum.rows.D <= Columns<N, kVectors / 2>::kPart) return launch_sum<Row, Out, N, kVectors / 2>(sum, stream);
  }
  const int64_t parts = Columns<N, kVectors>::parts(sum.rows.D);
  const int64_t blocks = (sum.maps.T * parts + PartsBlock::kWarps - 1) / PartsBlock::kWarps;
  return launch("combine", sum_rows<Row, Out, N, kVectors>, {blocks, PartsBlock::kThreads, 0, stream, true}, sum,
                parts);
}

}  // namespace

ab_status compute_sum(const GatherSum& sum, cudaStream_t stream) {
  if (sum.rows.D == 0) return ok();
  const auto launch = [&]<class Row, class Out, int N>(Row, Out, std::integral_constant<int, N>) {
    return launch_sum<Row, Out, N>(sum, stream);
  };
  return with_row_types(sum.rows, sum.out, launch, sum.addend.data);
}

}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_combine(const ab_combine_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::combine);
  GatherSum sum;
  AB_RETURN_IF_ERROR(check_combine(args, &sum));
  return cuda::compute_sum(sum, cuda::stream_of(exec));
}
