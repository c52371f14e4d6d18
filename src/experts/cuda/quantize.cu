#include "experts/cuda/quantize.h"

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/fp8.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kEach = 8;  // neighbours that a thread has
constexpr int kThreads = 256;
constexpr int kLanes = static_cast<int>(kScaleBlock) / kEach;  // of a row of a block

// 8 elements, `stride` apart; kWhole: next to next, and aligned.
template <bool kWhole, class T>
__device__ __forceinline__ void load_eight(const T* from, int64_t stride, float (&values)[kEach]) {
  if constexpr (kWhole) {
    constexpr int kOfAccess = kAccessBytes / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kEach; i += kOfAccess) {
      Vector<T, kOfAccess> some;
      some.load_if(true, from + i);
#pragma unroll
      for (int j = 0; j < kOfAccess; ++j) values[i + j] = some[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = to_float(from[i * stride]);
  }
}

__device__ __forceinline__ uint32_t largest_of(const float (&values)[kEach]) {
  uint32_t largest = 0;
#pragma unroll
  for (const float value : values) largest = max(largest, magnitude_bits(value));
  return largest;
}

__device__ __forceinline__ uint2 quantized(const float (&values)[kEach], float scale) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = pack_fp8(values[4 * i] / scale, values[4 * i + 1] / scale) |
               pack_fp8(values[4 * i + 2] / scale, values[4 * i + 3] / scale) << 16;
  }
  return {words[0], words[1]};
}

template <bool kWhole>
__device__ __forceinline__ void store_eight(uint8_t* to, uint2 bytes) {
  if constexpr (kWhole) {
    *reinterpret_cast<uint2*>(to) = bytes;
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8);
  }
}

// How blocks of scales lie in rows: block b of `parts` and `of_part` a row begins at
//     row_stride * row + part_stride * part + block_stride * block, elements `stride` apart.
struct RowBlocks {
  int64_t count;
  int32_t parts;
  int32_t of_part;
  int64_t row_stride;
  int64_t part_stride;
  int64_t block_stride;
  int64_t stride;

  __device__ int64_t first(int64_t block) const {
    const int64_t row_part = block / of_part;
    return row_part / parts * row_stride + row_part % parts * part_stride + block % of_part * block_stride;
  }
};

// A block of scales is 16 threads, which take kAtOnce of them. kWhole: blocks follow each other, aligned.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks(const T* x, RowBlocks blocks, uint8_t* q, float* scales, bool power_of_two) {
  constexpr int kAtOnce = 4;
  wait_for_previous_kernel();
  const int64_t first = int64_t{blockIdx.x} * (kThreads / kLanes * kAtOnce) + threadIdx.x / kLanes;
  const int place = static_cast<int>(threadIdx.x) % kLanes * kEach;
  float values[kAtOnce][kEach];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t block = min(first + i * (kThreads / kLanes), blocks.count - 1);
    const int64_t from = kWhole ? block * kScaleBlock + place : blocks.first(block) + place * blocks.stride;
    load_eight<kWhole>(x + from, blocks.stride, values[i]);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const uint32_t largest = max_lanes<kLanes>(largest_of(values[i]));
    const float scale = block_scale(largest, power_of_two);
    const int64_t block = first + i * (kThreads / kLanes);
    if (block >= blocks.count) continue;
    store_eight<kWhole>(q + block * kScaleBlock + place, quantized(values[i], scale));
    if (place == 0) scales[block] = scale;
  }
  let_next_kernel_start();
}

// Weights as the kernel sees them: `inner` is the axis that lies next to next, or nearly.
struct WeightBlocks {
  int64_t of_expert;  // elements of w
  int64_t inner_stride;
  int64_t outer_stride;
  int64_t part_stride;
  int32_t inner_blocks;
  int32_t outer_blocks;
  int32_t parts;
  bool inner_is_f;
};

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    quantize_weight_blocks(const T* w, WeightBlocks s, uint8_t* q, uint8_t* q_transposed, float* scales,
                           bool power_of_two) {
  constexpr int kSide = static_cast<int>(kScaleBlock);
  constexpr int kRowBytes = kSide + 4;
  constexpr int kRounds = kSide * kLanes / kThreads;
  alignas(16) __shared__ uint8_t tile[kSide * kRowBytes];
  __shared__ uint32_t largest_of_warps[kThreads / kWarp];
  wait_for_previous_kernel();
  int32_t index = static_cast<int32_t>(blockIdx.x);
  const int32_t inner_block = index % s.inner_blocks;
  index /= s.inner_blocks;
  const int32_t part = index % s.parts;
  index /= s.parts;
  const int32_t outer_block = index % s.outer_blocks;
  const int64_t expert = index / s.outer_blocks;
  const int inner = static_cast<int>(threadIdx.x) % kLanes * kEach;
  const int outer = static_cast<int>(threadIdx.x) / kLanes;
  const T* from = w + expert * s.of_expert + part * s.part_stride +
                  (int64_t{outer_block} * kSide + outer) * s.outer_stride +
                  (int64_t{inner_block} * kSide + inner) * s.inner_stride;
  float values[kRounds][kEach];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    load_eight<kWhole>(from + i * (kThreads / kLanes) * s.outer_stride, s.inner_stride, values[i]);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) largest = max(largest, largest_of(values[i]));
  largest = max_lanes<kWarp>(largest);
  if (lane_index() == 0) largest_of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t of_warp : largest_of_warps) largest = max(largest, of_warp);
  const float scale = block_scale(largest, power_of_two);

  // [E, D, P, F] and [E, P, F, D]: the one whose rows run along the inner axis at once, the other one by the tile.
  const int64_t inner_size = int64_t{s.inner_blocks} * kSide;
  const int64_t outer_size = int64_t{s.outer_blocks} * kSide;
  const int64_t d_size = s.inner_is_f ? outer_size : inner_size;
  const int64_t f_size = s.inner_is_f ? inner_size : outer_size;
  const auto row_of = [&](int64_t d, int64_t f, bool transposed) {
    return transposed ? ((expert * s.parts + part) * f_size + f) * d_size + d
                      : ((expert * d_size + d) * s.parts + part) * f_size + f;
  };
  uint8_t* along = s.inner_is_f ? q : q_transposed;
  uint8_t* across = s.inner_is_f ? q_transposed : q;
  const auto place_of = [&](int64_t of_inner, int64_t of_outer, bool across_it) {
    const int64_t d = s.inner_is_f ? of_outer : of_inner;
    const int64_t f = s.inner_is_f ? of_inner : of_outer;
    return row_of(d, f, s.inner_is_f == across_it);
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = outer + i * (kThreads / kLanes);
    const uint2 bytes = quantized(values[i], scale);
    if (along != nullptr) {
      store_eight<kWhole>(
          along + place_of(int64_t{inner_block} * kSide + inner, int64_t{outer_block} * kSide + row, false), bytes);
    }
    auto* words = reinterpret_cast<uint32_t*>(tile + row * kRowBytes + inner);
    words[0] = bytes.x;
    words[1] = bytes.y;
  }
  if (threadIdx.x == 0) {
    const int32_t d_block = s.inner_is_f ? outer_block : inner_block;
    const int32_t f_block = s.inner_is_f ? inner_block : outer_block;
    scales[((expert * (d_size / kSide) + d_block) * s.parts + part) * (f_size / kSide) + f_block] = scale;
  }
  let_next_kernel_start();
  if (across == nullptr) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = outer + i * (kThreads / kLanes);  // along the inner axis now
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kEach; ++j) words[j / 4] |= uint32_t{tile[(inner + j) * kRowBytes + row]} << j % 4 * 8;
    store_eight<kWhole>(
        across + place_of(int64_t{inner_block} * kSide + row, int64_t{outer_block} * kSide + inner, true),
        {words[0], words[1]});
  }
}

ab_status quantize_row_blocks(const Floats& x, const RowBlocks& blocks, const Fp8Output& out, cudaStream_t stream) {
  constexpr int64_t kOfBlock = kThreads / kLanes * 4;
  if (blocks.count == 0) return ok();
  const bool whole = blocks.stride == 1 && common_alignment({address(x.data), 2 * address(out.values)}) == kAccessBytes;
  return with_float_type(x.dtype, [&]<class T>(T) {
    const Launch shape{(blocks.count + kOfBlock - 1) / kOfBlock, kThreads, 0, stream, true};
    return launch("quantize_rows", whole ? quantize_blocks<T, true> : quantize_blocks<T, false>, shape,
                  static_cast<const T*>(x.data), blocks, static_cast<uint8_t*>(out.values), out.scales,
                  out.power_of_two);
  });
}

}  // namespace

ab_status quantize_rows(const Floats& x, int64_t R, int64_t D, const Fp8Output& out, cudaStream_t stream) {
  const int64_t of_row = D / kScaleBlock;
  return quantize_row_blocks(x, {R * of_row, 1, static_cast<int32_t>(of_row), D, 0, kScaleBlock, 1}, out, stream);
}

ab_status quantize_pairs(const Floats& x, int64_t R, int64_t F, const Fp8Output& out, cudaStream_t stream) {
  const int64_t of_part = F / kScaleBlock;
  return quantize_row_blocks(x, {2 * R * of_part, 2, static_cast<int32_t>(of_part), 2 * F, 1, 2 * kScaleBlock, 2}, out,
                             stream);
}

ab_status quantize_weights(const Floats& w, const QuantizedSizes& s, void* q, void* q_transposed, float* scales,
                           bool power_of_two, cudaStream_t stream) {
  const bool inner_is_f = s.f_stride < s.d_stride;
  WeightBlocks blocks;
  blocks.of_expert = s.D * s.P * s.F;
  blocks.inner_stride = inner_is_f ? s.f_stride : s.d_stride;
  blocks.outer_stride = inner_is_f ? s.d_stride : s.f_stride;
  blocks.part_stride = s.p_stride;
  blocks.inner_blocks = static_cast<int32_t>((inner_is_f ? s.F : s.D) / kScaleBlock);
  blocks.outer_blocks = static_cast<int32_t>((inner_is_f ? s.D : s.F) / kScaleBlock);
  blocks.parts = static_cast<int32_t>(s.P);
  blocks.inner_is_f = inner_is_f;
  const int64_t count = s.E * s.P * (s.D / kScaleBlock) * (s.F / kScaleBlock);
  if (count == 0) return ok();
  const bool whole = blocks.inner_stride == 1 &&
                     common_alignment({address(w.data), 2 * address(q), 2 * address(q_transposed)}) == kAccessBytes;
  return with_float_type(w.dtype, [&]<class T>(T) {
    return launch("quantize_weights", whole ? quantize_weight_blocks<T, true> : quantize_weight_blocks<T, false>,
                  {count, kThreads, 0, stream, true}, static_cast<const T*>(w.data), blocks, static_cast<uint8_t*>(q),
                  static_cast<uint8_t*>(q_transposed), scales, power_of_two);
  });
}

}  // namespace anabranch::cuda
