#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"
#include "experts/cuda/quantize.cuh"
#include "experts/cuda/quantize.h"

namespace anabranch::cuda {
namespace {

// Layout of scale blocks in rows. Rows have `parts` parts of `part_blocks` blocks. A block begins at
//     row_stride * row + part_stride * part + block_stride * block, and its elements are `stride` apart.
struct RowBlocks {
  int64_t count;
  int32_t parts;
  int32_t part_blocks;
  int64_t row_stride;
  int64_t part_stride;
  int64_t block_stride;
  int64_t stride;

  __device__ int64_t first(int64_t block) const {
    const int64_t row_part = block / part_blocks;
    return row_part / parts * row_stride + row_part % parts * part_stride + block % part_blocks * block_stride;
  }
};

constexpr int kAtOnce = 4;

// 16 threads quantise kAtOnce scale blocks. kWhole: blocks are contiguous and aligned.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_blocks(const T* x, RowBlocks blocks, uint8_t* q, float* scales, bool power_of_two) {
  constexpr int kRoundBlocks = kQuantizeThreads / kNeighbourLanes;
  wait_for_previous_kernel();
  const int64_t first = int64_t{blockIdx.x} * (kRoundBlocks * kAtOnce) + threadIdx.x / kNeighbourLanes;
  const int place = static_cast<int>(threadIdx.x) % kNeighbourLanes * kNeighbours;
  Neighbours<T> values[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t block = min(first + i * kRoundBlocks, blocks.count - 1);
    if constexpr (kWhole) {
      values[i].load(x + block * kScaleBlock + place);
    } else {
      values[i].load(x + blocks.first(block) + place * blocks.stride, blocks.stride);
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const Fp8Divider divider(block_scale(max_lanes<kNeighbourLanes>(values[i].largest()), power_of_two));
    const int64_t block = first + i * kRoundBlocks;
    if (block >= blocks.count) continue;
    store_neighbours<kWhole>(q + block * kScaleBlock + place, divider.pack(values[i]));
    if (place == 0) scales[block] = divider.scale();
  }
  let_next_kernel_start();
}

ab_status quantize_row_blocks(const Floats& x, const RowBlocks& blocks, const Fp8Output& out, cudaStream_t stream) {
  constexpr int64_t kCtaBlocks = kQuantizeThreads / kNeighbourLanes * kAtOnce;
  if (blocks.count == 0) return ok();
  const bool whole = blocks.stride == 1 && common_alignment({address(x.data), 2 * address(out.values)}) == kAccessBytes;
  return with_float_type(x.dtype, [&]<class T>(T) {
    const Launch shape{(blocks.count + kCtaBlocks - 1) / kCtaBlocks, kQuantizeThreads, 0, stream, true};
    return launch("quantize_rows", whole ? quantize_blocks<T, true> : quantize_blocks<T, false>, shape,
                  static_cast<const T*>(x.data), blocks, static_cast<uint8_t*>(out.values), out.scales,
                  out.power_of_two);
  });
}

}  // namespace

ab_status quantize_rows(const Floats& x, int64_t R, int64_t D, const Fp8Output& out, cudaStream_t stream) {
  const int64_t row_blocks = D / kScaleBlock;
  return quantize_row_blocks(x, {R * row_blocks, 1, static_cast<int32_t>(row_blocks), D, 0, kScaleBlock, 1}, out,
                             stream);
}

ab_status quantize_pairs(const Floats& x, int64_t R, int64_t F, const Fp8Output& out, cudaStream_t stream) {
  const int64_t part_blocks = F / kScaleBlock;
  return quantize_row_blocks(
      x, {2 * R * part_blocks, 2, static_cast<int32_t>(part_blocks), 2 * F, 1, 2 * kScaleBlock, 2}, out, stream);
}

}  // namespace anabranch::cuda
