#include "experts/cuda/sum_parts.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "core/floats.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;  // per SM
constexpr int kWidth = 4;   // elements per thread

struct Parts {
  const float* parts;  // [count, R, N]
  int64_t count;
  const int32_t* group_sizes;
  int64_t E;
  int64_t R;
  int64_t N;
  RowMap map;
  float factor;
};

template <class Out>
__global__ void __launch_bounds__(kThreads) add_parts(const Parts p, Out* const y) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int64_t rows = 0;  // of all groups
  for (int64_t e = lane_index(); e < p.E; e += kWarp) rows += max(p.group_sizes[e], 0);
  rows = min(sum_lanes<kWarp>(rows), p.R);
  const int64_t vectors = p.N / kWidth;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.R * vectors;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / vectors;
    float sums[kWidth] = {};
    if (row < rows && p.map.slot_of(static_cast<int32_t>(row)) >= 0) {
      const float* part = p.parts + i * kWidth;
      for (int64_t n = 0; n < p.count; ++n, part += p.R * p.N) {
        Vector<float, kWidth> values;
        values.load(part);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] *= p.factor;
    }
    Vector<Out, kWidth>::from(sums).store_if(true, y + i * kWidth);
  }
}

}  // namespace

ab_status sum_parts(const RowsProduct& p, const float* parts, int64_t count, int multiprocessors, cudaStream_t stream) {
  const Parts arguments{parts, count, p.group_sizes, p.E, p.R, p.N, p.map, p.factor};
  const int64_t blocks = (p.R * p.N / kWidth - 1) / kThreads + 1;
  const Launch launched{std::min(blocks, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true};
  return with_float_type(p.dtype, [&]<class Out>(Out) {
    return launch("sum of parts", add_parts<Out>, launched, arguments, static_cast<Out*>(p.y));
  });
}

}  // namespace anabranch::cuda
