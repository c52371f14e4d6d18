#include "experts/cuda/packed.h"

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/packed_words.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;       // per SM
constexpr int kChunkBytes = 16;  // of packed values per thread: one block of MXFP4, or 16 elements of an FP8 block

struct Unpack {
  PackedMatrices from;
  int64_t first;               // matrix
  int64_t chunks;              // of all matrices to unpack
  const int32_t* group_sizes;  // or nullptr
  bool is_aligned;             // to 16 bytes: packed values and results
};

__device__ float scale_of(const Unpack& p, int64_t matrix, int64_t row, int64_t column) {
  const int64_t blocks = p.from.C / kScaleBlock;
  const int64_t i = (matrix * (p.from.N / kScaleBlock) + row / kScaleBlock) * blocks + column / kScaleBlock;
  return block_scale(p.from.scales, p.from.scales_dtype, i);
}

// Stores elements first ... first + 16 / sizeof(T) - 1 of a chunk.
template <class T, class Value>
__device__ __forceinline__ void store(T* to, int first, bool is_aligned, const Value& value) {
  constexpr int kCount = kAccessBytes / static_cast<int>(sizeof(T));
  float values[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = value(first + j);
  if (is_aligned) {
    Vector<T, kCount>::from(values).store_if(true, to + first);
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[first + j] = from_float<T>(values[j]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) unpack_chunks(const Unpack p, T* const to) {
  constexpr int kCount = kAccessBytes / static_cast<int>(sizeof(T));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool fp4 = p.from.dtype == AB_FLOAT4_E2M1X2;
  const int elements = fp4 ? 2 * kChunkBytes : kChunkBytes;
  const int64_t in_matrix = p.from.N * p.from.C / elements;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.chunks; i += int64_t{gridDim.x} * kThreads) {
    const int64_t matrix = p.first + i / in_matrix;
    if (p.group_sizes != nullptr && p.group_sizes[matrix] <= 0) continue;
    const int64_t chunk = i % in_matrix;
    const uint8_t* const source = p.from.values + (matrix * in_matrix + chunk) * kChunkBytes;
    alignas(16) uint8_t bytes[kChunkBytes];
    if (p.is_aligned) {
      *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(source);
    } else {
#pragma unroll
      for (int j = 0; j < kChunkBytes; ++j) bytes[j] = source[j];
    }
    T* const results = to + i * elements;
    if (fp4) {
      const float scale = e8m0_value(static_cast<const uint8_t*>(p.from.scales)[matrix * in_matrix + chunk]);
#pragma unroll
      for (int first = 0; first < 2 * kChunkBytes; first += kCount) {
        store(results, first, p.is_aligned, [&](int j) { return e2m1_value(bytes[j / 2] >> 4 * (j % 2)) * scale; });
      }
    } else {
      const int64_t element = chunk * elements;
      const float scale = scale_of(p, matrix, element / p.from.C, element % p.from.C);
#pragma unroll
      for (int first = 0; first < kChunkBytes; first += kCount) {
        store(results, first, p.is_aligned, [&](int j) { return to_float(Float8E4M3{bytes[j]}) * scale; });
      }
    }
  }
}

// One thread per block.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pack_blocks(const T* const w, const int64_t blocks, const bool ceil, uint8_t* const codes, uint8_t* const scales) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < blocks; i += int64_t{gridDim.x} * kThreads) {
    const T* const from = w + i * kMxBlock;
    uint32_t largest = 0;
    for (int j = 0; j < kMxBlock; ++j) largest = max(largest, magnitude_bits(to_float(from[j])));
    const uint8_t scale = mx_scale(largest, ceil);
    const bool is_nan = scale == 255u;
    const float inverse = is_nan ? 0.0f : e8m0_value(static_cast<uint8_t>(254 - scale));
    for (int j = 0; j < kMxBlock / 2; ++j) {
      const uint32_t low = e2m1_code(to_float(from[2 * j]) * inverse);
      const uint32_t high = e2m1_code(to_float(from[2 * j + 1]) * inverse);
      codes[i * (kMxBlock / 2) + j] = static_cast<uint8_t>(is_nan ? 0u : low | high << 4);
    }
    scales[i] = scale;
  }
}

Launch shape_of(int64_t items, const Device& device, cudaStream_t stream) {
  return {std::min((items + kThreads - 1) / kThreads, int64_t{kBlocks} * device.multiprocessors), kThreads, 0, stream,
          true};
}

}  // namespace

ab_status unpack(const PackedMatrices& from, const ExpertRange& range, const int32_t* group_sizes, void* to,
                 int32_t dtype, const Device& device, cudaStream_t stream) {
  const int64_t elements = (from.dtype == AB_FLOAT4_E2M1X2 ? 2 : 1) * kChunkBytes;
  const bool is_aligned = common_alignment({address(from.values), address(to)}) == kAccessBytes;
  const Unpack op{from, range.first, (range.end - range.first) * (from.N * from.C / elements), group_sizes, is_aligned};
  return with_float_type(dtype, [&]<class T>(T) {
    return launch("unpack", unpack_chunks<T>, shape_of(op.chunks, device, stream), op, static_cast<T*>(to));
  });
}

ab_status pack_mxfp4(const void* w, int32_t dtype, int64_t blocks, bool ceil, uint8_t* codes, uint8_t* scales,
                     const Device& device, cudaStream_t stream) {
  return with_float_type(dtype, [&]<class T>(T) {
    return launch("pack_mxfp4", pack_blocks<T>, shape_of(blocks, device, stream), static_cast<const T*>(w), blocks,
                  ceil, codes, scales);
  });
}

}  // namespace anabranch::cuda
