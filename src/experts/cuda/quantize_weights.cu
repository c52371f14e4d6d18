// Quantises weights in blocks of 128 x 128. One CTA per block reads it once and writes it in both orientations: as
// read, and transposed by 8 x 8 bytes in registers, then as a whole in shared memory.
#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"
#include "experts/cuda/quantize.cuh"
#include "experts/cuda/quantize.h"

namespace anabranch::cuda {
namespace {

constexpr int kSide = static_cast<int>(kScaleBlock);

// Layout of the weights in memory. `inner` is the axis with the smallest stride.
struct WeightBlocks {
  int64_t expert_stride;  // elements of w
  int64_t inner_stride;
  int64_t outer_stride;
  int64_t part_stride;
  int32_t inner_blocks;
  int32_t outer_blocks;
  int32_t parts;
  bool inner_is_f;
};

// Indices of a block. Parts vary fastest: where they alternate in memory, the second part is still in the cache.
struct Place {
  int32_t part;
  int32_t inner_block;
  int32_t outer_block;
  int64_t expert;

  __device__ Place(int32_t index, const WeightBlocks& s) {
    part = index % s.parts;
    index /= s.parts;
    inner_block = index % s.inner_blocks;
    index /= s.inner_blocks;
    outer_block = index % s.outer_blocks;
    expert = index / s.outer_blocks;
  }
};

// Transposes 4 words of 4 bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t first[2] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
  const uint32_t last[2] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
  words[0] = __byte_perm(first[0], first[1], 0x5410);
  words[1] = __byte_perm(first[0], first[1], 0x7632);
  words[2] = __byte_perm(last[0], last[1], 0x5410);
  words[3] = __byte_perm(last[0], last[1], 0x7632);
}

// Transposes 8 x 8 bytes, one row of 8 bytes per element of `rows`.
__device__ __forceinline__ void transpose_bytes(uint2 (&rows)[kNeighbours]) {
  uint32_t quarters[2][2][4];  // [lower, upper 4 bytes][first, last 4 rows]
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) {
    quarters[0][i / 4][i % 4] = rows[i].x;
    quarters[1][i / 4][i % 4] = rows[i].y;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) transpose_bytes(quarters[i / 2][i % 2]);
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) rows[i] = {quarters[i / 4][0][i % 4], quarters[i / 4][1][i % 4]};
}

// A block of 128 x 128 bytes in pieces of 8 bytes, swizzled so that neither rows nor columns of pieces have bank
// conflicts.
struct TransposedBlock {
  uint2 pieces[kSide * kNeighbourLanes];

  __device__ uint2& at(int row, int piece) {
    return pieces[row * kNeighbourLanes + (piece ^ (row / kNeighbours % kNeighbourLanes))];
  }
};

// Layout of adjacent elements along the inner axis: any stride, or aligned and contiguous, or aligned at a stride of 2.
enum class InnerLayout { strided, contiguous, alternating };

template <class T, InnerLayout kLayout>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_weight_blocks(const T* w, WeightBlocks s, uint8_t* q, uint8_t* q_transposed, float* scales,
                           bool power_of_two) {
  constexpr bool kWhole = kLayout != InnerLayout::strided;
  static_assert(kQuantizeThreads * kNeighbours * kNeighbours == kSide * kSide,
                "threads cover a block of 128 x 128 weights exactly");
  __shared__ TransposedBlock transposed;
  __shared__ uint32_t warp_largest[kQuantizeThreads / kWarp];
  wait_for_previous_kernel();
  const Place place(static_cast<int32_t>(blockIdx.x), s);
  // The thread loads 8 adjacent elements of each of 8 adjacent rows.
  const int piece = static_cast<int>(threadIdx.x) % kNeighbourLanes;
  const int row_piece = static_cast<int>(threadIdx.x) / kNeighbourLanes;
  const int64_t inner = int64_t{place.inner_block} * kSide;
  const int64_t outer = int64_t{place.outer_block} * kSide;
  const T* from = w + place.expert * s.expert_stride +
                  (kLayout == InnerLayout::alternating ? 0 : place.part * s.part_stride) +
                  (outer + row_piece * kNeighbours) * s.outer_stride + (inner + piece * kNeighbours) * s.inner_stride;
  Neighbours<T> values[kNeighbours];
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) {
    const T* row = from + i * s.outer_stride;
    if constexpr (kLayout == InnerLayout::contiguous) values[i].load(row);
    if constexpr (kLayout == InnerLayout::alternating) values[i].load_alternate(row, place.part == 1);
    if constexpr (kLayout == InnerLayout::strided) values[i].load(row, s.inner_stride);
  }
  uint32_t largest = 0;
#pragma unroll
  for (const Neighbours<T>& row : values) largest = max(largest, row.largest());
  largest = max_lanes<kWarp>(largest);
  if (lane_index() == 0) warp_largest[threadIdx.x / kWarp] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : warp_largest) largest = max(largest, other);
  const Fp8Divider divider(block_scale(largest, power_of_two));
  uint2 rows[kNeighbours];
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) rows[i] = divider.pack(values[i]);

  // Write first the output whose rows run along the inner axis, of [E, D, P, F] and [E, P, F, D], then the other one.
  const int64_t inner_size = int64_t{s.inner_blocks} * kSide;
  const int64_t outer_size = int64_t{s.outer_blocks} * kSide;
  const int64_t d_size = s.inner_is_f ? outer_size : inner_size;
  const int64_t f_size = s.inner_is_f ? inner_size : outer_size;
  const auto place_in_q = [&](int64_t d, int64_t f) {
    return ((place.expert * d_size + d) * s.parts + place.part) * f_size + f;
  };
  const auto place_in_transposed = [&](int64_t d, int64_t f) {
    return ((place.expert * s.parts + place.part) * f_size + f) * d_size + d;
  };
  uint8_t* along = s.inner_is_f ? q : q_transposed;
  uint8_t* across = s.inner_is_f ? q_transposed : q;
  if (along != nullptr) {
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      const int64_t row = outer + row_piece * kNeighbours + i;
      const int64_t column = inner + piece * kNeighbours;
      store_neighbours<kWhole>(along + (s.inner_is_f ? place_in_q(row, column) : place_in_transposed(column, row)),
                               rows[i]);
    }
  }
  if (threadIdx.x == 0) {
    const int32_t d_block = s.inner_is_f ? place.outer_block : place.inner_block;
    const int32_t f_block = s.inner_is_f ? place.inner_block : place.outer_block;
    scales[((place.expert * (d_size / kSide) + d_block) * s.parts + place.part) * (f_size / kSide) + f_block] =
        divider.scale();
  }
  let_next_kernel_start();
  if (across == nullptr) return;
  transpose_bytes(rows);
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) transposed.at(piece * kNeighbours + i, row_piece) = rows[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNeighbours; ++i) {
    const int inner_row = row_piece + i * kNeighbourLanes;  // along the inner axis
    const int64_t row = inner + inner_row;
    const int64_t column = outer + piece * kNeighbours;
    store_neighbours<kWhole>(across + (s.inner_is_f ? place_in_transposed(column, row) : place_in_q(row, column)),
                             transposed.at(inner_row, piece));
  }
}

}  // namespace

ab_status quantize_weights(const Floats& w, const QuantizedSizes& s, void* q, void* q_transposed, float* scales,
                           bool power_of_two, cudaStream_t stream) {
  const bool inner_is_f = s.f_stride < s.d_stride;
  WeightBlocks blocks;
  blocks.expert_stride = s.D * s.P * s.F;
  blocks.inner_stride = inner_is_f ? s.f_stride : s.d_stride;
  blocks.outer_stride = inner_is_f ? s.d_stride : s.f_stride;
  blocks.part_stride = s.p_stride;
  blocks.inner_blocks = static_cast<int32_t>((inner_is_f ? s.F : s.D) / kScaleBlock);
  blocks.outer_blocks = static_cast<int32_t>((inner_is_f ? s.D : s.F) / kScaleBlock);
  blocks.parts = static_cast<int32_t>(s.P);
  blocks.inner_is_f = inner_is_f;
  const int64_t count = s.E * s.P * (s.D / kScaleBlock) * (s.F / kScaleBlock);
  if (count == 0) return ok();
  const bool aligned = common_alignment({address(w.data), 2 * address(q), 2 * address(q_transposed)}) == kAccessBytes;
  const bool pairs = s.P == 2 && blocks.part_stride == 1 && blocks.inner_stride == 2;
  return with_float_type(w.dtype, [&]<class T>(T) {
    using enum InnerLayout;
    const auto kernel = aligned && blocks.inner_stride == 1 ? quantize_weight_blocks<T, contiguous>
                        : aligned && pairs                  ? quantize_weight_blocks<T, alternating>
                                                            : quantize_weight_blocks<T, strided>;
    return launch("quantize_weights", kernel, {count, kQuantizeThreads, 0, stream, true}, static_cast<const T*>(w.data),
                  blocks, static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_transposed), scales, power_of_two);
  });
}

}  // namespace anabranch::cuda
