// Small-M grouped GEMM with packed weights. Units, CTAs, the split of k over warps and the order of sums are those of
// product.cuh, so results have the bits of that kernel on the unpacked weights. Each warp copies its weights through a
// ring of chunks in shared memory (packed_weights.cuh): these bytes are in flight while it unpacks earlier ones.
//
//   shared    [kWarps][kStages] chunks; [kWarps][kWarp] float4, the sums of the warps; the list of row ranges
#pragma once

#include <cstdint>

#include "experts/few_rows/packed_weights.cuh"
#include "experts/few_rows/product.cuh"

namespace anabranch::cuda::few_rows {

// main.w is not used.
struct PackedProduct : Product {
  PackedMatrices packed;
  int32_t first_column = 0;         // of the stored columns
  bool are_aligned = false;         // the weights and x, to 16 bytes
  bool has_aligned_chunks = false;  // the low-rank term, for WarpSum
};

// 16 bytes of 16-bit elements, of which `count` exist; the rest are zeros.
__device__ __forceinline__ uint4 load_elements(const void* from, int count) {
  const auto* const elements = static_cast<const uint16_t*>(from);
  const auto pair = [&](int i) {
    const uint32_t low = 2 * i < count ? elements[2 * i] : 0u;
    return low | (2 * i + 1 < count ? static_cast<uint32_t>(elements[2 * i + 1]) << 16 : 0u);
  };
  return {pair(0), pair(1), pair(2), pair(3)};
}

// One warp's sums over its steps of k of a unit.
template <class Format, class Element, int kWarps>
class PackedWarpSum {
 public:
  static constexpr int kChunkBytes = 16 * Format::kColumnBytes;
  static constexpr int kRingBytes = kWarps * Format::kStages * kChunkBytes;

  __device__ __forceinline__ PackedWarpSum(const PackedProduct& p, char* rings)
      : p_(p), ring_(rings + warp_index() * Format::kStages * kChunkBytes) {}

  // Starts the copies of the first chunks of a unit.
  __device__ __forceinline__ void begin(const UnitRows& rows, int32_t column) {
    const int own = lane_index() / 4;
    const int32_t row = min(rows.begin + own, rows.end - 1);
    x_row_ = p_.main.gathers ? p_.map.source_of(max(p_.map.slot_of(row), 0)) : row;
    const auto stored = static_cast<int32_t>(p_.columns.stored(column + own, 0));
    columns_ = {static_cast<int32_t>(rows.expert * p_.packed.N) + p_.first_column + stored,
                static_cast<int32_t>(p_.columns.stored(column + own, 1)) - stored};
    wait_for_copies<0>();  // of zeros, for the chunks after the last one of the unit before
    __syncwarp();          // all lanes have read the last chunks
    const typename Format::Source source(p_.packed, columns_, first_chunk());
#pragma unroll
    for (int i = 0; i < Format::kStages - 1; ++i) {
      const auto is_valid = valid_steps(first_chunk() + i);
      if (p_.are_aligned) {
        copy<true>(source, i, i, is_valid);
      } else {
        copy<false>(source, i, i, is_valid);
      }
    }
    next_scales_ = Format::load_scales(source, 0, valid_steps(first_chunk()));
  }

  // Adds the warp's share of the unit to the sums.
  __device__ __forceinline__ void run(float (&sums)[4]) {
    if (p_.are_aligned) {
      run<true>(sums);
    } else {
      run<false>(sums);
    }
  }

 private:
  // The warp's steps.
  __device__ __forceinline__ int begin_step() const { return p_.main.k / kDepth * warp_index() / kWarps; }
  __device__ __forceinline__ int end_step() const { return p_.main.k / kDepth * (warp_index() + 1) / kWarps; }
  __device__ __forceinline__ int first_chunk() const { return begin_step() / kChunkSteps; }
  // Whether a step of a chunk belongs to the warp.
  __device__ __forceinline__ auto valid_steps(int chunk) const {
    return [skipped = begin_step() - chunk * kChunkSteps, left = end_step() - chunk * kChunkSteps](int step) {
      return step >= skipped && step < left;
    };
  }
  // The lane's column of part 0.
  __device__ __forceinline__ char* column_in(int stage) const {
    return ring_ + stage * kChunkBytes + lane_index() / 4 * Format::kColumnBytes;
  }

  // For a chunk without steps of the warp this copies zeros or nothing.
  template <bool kAligned, class IsValid>
  __device__ __forceinline__ void copy(const typename Format::Source& source, int chunk, int stage,
                                       const IsValid& is_valid) const {
    Format::template copy<kAligned>(source, chunk, column_in(stage), lane_index() / 4, is_valid);
    end_copy_group();
  }

  template <bool kAligned>
  __device__ __forceinline__ void run(float (&sums)[4]) {
    typename Format::Source source(p_.packed, columns_, first_chunk());
    const Element* x = static_cast<const Element*>(p_.main.x) + int64_t{x_row_} * p_.main.k +
                       first_chunk() * kChunkSteps * kDepth + 8 * (lane_index() % 4);
    int stage = 0;
    int skipped = begin_step() % kChunkSteps;  // steps of the chunk before those of the warp
#pragma unroll 1
    for (int left = end_step() - first_chunk() * kChunkSteps; left > 0; left -= kChunkSteps) {
      const typename Format::Scales scales = next_scales_;
      next_scales_ = Format::load_scales(source, 1, [&](int step) { return step + kChunkSteps < left; });
      wait_for_copies<Format::kStages - 2>();
      __syncwarp();
      constexpr int kAheadChunks = Format::kStages - 1;
      copy<kAligned>(source, kAheadChunks, stage == 0 ? kAheadChunks : stage - 1,
                     [&](int step) { return step + kAheadChunks * kChunkSteps < left; });
      const char* const chunk = column_in(stage);
      if (kAligned && skipped == 0 && left >= kChunkSteps && Format::template allows_fast<Element>(scales)) {
        add<true, kAligned>(chunk, source, scales, x, 0, kChunkSteps, sums);
      } else {
        add<false, kAligned>(chunk, source, scales, x, skipped, left, sums);
      }
      source.advance();
      x += kChunkSteps * kDepth;
      skipped = 0;
      stage = stage == kAheadChunks ? 0 : stage + 1;
    }
  }

  // Adds steps begin, ..., end - 1 of a chunk; kFast: all four. x: the lane's elements of its row in step 0.
  template <bool kFast, bool kAligned>
  __device__ __forceinline__ void add(const char* chunk, const typename Format::Source& source,
                                      const typename Format::Scales& scales, const Element* x, int begin, int end,
                                      float (&sums)[4]) const {
    const auto factors = Format::template factors_of<Element, kFast>(p_.packed, source, scales);
#pragma unroll
    for (int first = 0; first < kChunkSteps; first += kAhead) {
      uint4 rows[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!kFast && (first + i < begin || first + i >= end)) continue;
        const Element* const from = x + (first + i) * kDepth;
        rows[i] = kAligned ? *reinterpret_cast<const uint4*>(from) : load_elements(from, 8);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!kFast && (first + i < begin || first + i >= end)) continue;
        LaneWeights w[2];
        Format::template load<Element, kFast>(chunk, lane_index() / 4, first + i, factors, w);
        const uint32_t (&a)[4] = w[0].words;
        const uint32_t (&b)[4] = w[1].words;
        multiply_add_matrices<Element>(sums, {a[0], b[0], a[1], b[1]}, rows[i].x, rows[i].y);
        multiply_add_matrices<Element>(sums, {a[2], b[2], a[3], b[3]}, rows[i].z, rows[i].w);
      }
    }
  }

  const PackedProduct& p_;
  char* ring_;
  typename Format::Scales next_scales_{};
  int32_t x_row_ = 0;
  LaneColumns columns_;
};

// Adds the low-rank term of any rank and alignment, in the order of WarpSum.
template <class Element, int kWarps>
__device__ __forceinline__ void add_unaligned_low_rank(const Product& p, const UnitRows& rows, int32_t column,
                                                       float (&sums)[4]) {
  const Operands& of = p.low_rank;
  const int own = lane_index() / 4;
  const int32_t row = min(rows.begin + own, rows.end - 1);
  const auto* const x = static_cast<const Element*>(of.x) + int64_t{row} * of.k;
  const auto* const matrix = static_cast<const Element*>(of.w) + rows.expert * of.matrix;
  const Element* w[2];
#pragma unroll
  for (int part = 0; part < 2; ++part) w[part] = matrix + p.columns.stored(column + own, part) * of.k;
  const int steps = (of.k + kDepth - 1) / kDepth;
#pragma unroll 1
  for (int step = steps * warp_index() / kWarps; step < steps * (warp_index() + 1) / kWarps; ++step) {
    const int k = step * kDepth + 8 * (lane_index() % 4);
    const int count = of.k - k;
    const uint4 a = load_elements(w[0] + k, count);
    const uint4 b = load_elements(w[1] + k, count);
    const uint4 c = load_elements(x + k, count);
    multiply_add_matrices<Element>(sums, {a.x, b.x, a.y, b.y}, c.x, c.y);
    multiply_add_matrices<Element>(sums, {a.z, b.z, a.w, b.w}, c.z, c.w);
  }
}

template <class Format, class Element, int kWarps, class Epilogue>
__global__ void __launch_bounds__(kWarps* kWarp, kThreadsPerSm / (kWarps * kWarp))
    few_rows_packed_product(const __grid_constant__ PackedProduct p, const __grid_constant__ Epilogue epilogue) {
  using Sum = PackedWarpSum<Format, Element, kWarps>;
  char* const rings = dynamic_shared_array<char>();
  auto* const sums = reinterpret_cast<float4(*)[kWarp]>(rings + Sum::kRingBytes);
  auto* const list = reinterpret_cast<UnitRows*>(sums + kWarps);
  wait_for_previous_kernel();
  let_next_kernel_start();
  __shared__ int32_t units;  // in a register it would spill
  if (const int32_t ranges = list_rows(p, list); threadIdx.x == 0) units = ranges * p.slices;
  __syncthreads();
  const auto column_of = [&](int32_t unit) { return unit % p.slices * p.columns.unit_columns(); };

  Sum sum(p, rings);
  // Starts the copies of a unit; returns whether it has any.
  const auto begin = [&](int32_t unit) {
    if (unit >= units || !has_rows(p, list[unit / p.slices])) return false;
    sum.begin(list[unit / p.slices], column_of(unit));
    return true;
  };
  auto unit = static_cast<int32_t>(blockIdx.x);
  bool sums_up = begin(unit);
#pragma unroll 1
  while (unit < units) {
    const UnitRows rows = list[unit / p.slices];
    const int32_t column = column_of(unit);
    const bool summed_up = sums_up;
    float warp_sums[4] = {};
    if (summed_up) {
      sum.run(warp_sums);
      if (p.low_rank.k > 0) {
        if (p.has_aligned_chunks) {
          WarpSum<Element>(p, p.low_rank, rows, column).template run<kWarps>(warp_sums);
        } else {
          add_unaligned_low_rank<Element, kWarps>(p, rows, column, warp_sums);
        }
      }
    }
    const OwnResult own(p, rows, summed_up);
    unit += static_cast<int32_t>(gridDim.x);
    sums_up = begin(unit);  // the next unit's weights arrive while this one's sums are added up
    write_results<kWarps>(p, rows, column, own, summed_up, warp_sums, sums, epilogue);
  }
}

template <class Format, class Element, int kWarps, class Epilogue>
ab_status launch_packed_product(const char* name, PackedProduct p, const Epilogue& epilogue, int multiprocessors,
                                cudaStream_t stream) {
  constexpr int kThreads = kWarps * kWarp;
  constexpr int kBlocks = kThreadsPerSm / kThreads;  // resident per SM
  const int64_t lists = set_units(&p);
  const size_t shared = PackedWarpSum<Format, Element, kWarps>::kRingBytes + shared_bytes(kThreads, lists);
  return launch(
      name, few_rows_packed_product<Format, Element, kWarps, Epilogue>,
      {std::min(lists * p.slices, int64_t{kBlocks} * multiprocessors), kThreads, shared, stream, true, 1, kBlocks}, p,
      epilogue);
}

template <class Epilogue>
ab_status launch_packed_product(const char* name, int32_t dtype, const PackedProduct& p, const Epilogue& epilogue,
                                int multiprocessors, cudaStream_t stream) {
  const auto with_types = [&]<class Format, class Element>() {
    const auto kernel = p.main.k >= kLongSum     ? launch_packed_product<Format, Element, 16, Epilogue>
                        : p.main.k >= kMediumSum ? launch_packed_product<Format, Element, 8, Epilogue>
                                                 : launch_packed_product<Format, Element, 4, Epilogue>;
    return kernel(name, p, epilogue, multiprocessors, stream);
  };
  const auto with_format = [&]<class Format>() {
    return dtype == AB_BFLOAT16 ? with_types.template operator()<Format, BFloat16>()
                                : with_types.template operator()<Format, Float16>();
  };
  return p.packed.dtype == AB_FLOAT4_E2M1X2 ? with_format.template operator()<Fp4Format>()
                                            : with_format.template operator()<Fp8Format>();
}

// Whether data is 16-byte aligned.
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The GEMM `plain` with packed weights. Its field main.w is not used.
inline PackedProduct packed_product(const Product& plain, const PackedMatrices& packed, int64_t first_column) {
  PackedProduct p{plain, packed, static_cast<int32_t>(first_column)};
  p.are_aligned = is_aligned(packed.values) && is_aligned(p.main.x);
  p.has_aligned_chunks = is_aligned(p.low_rank.x) && is_aligned(p.low_rank.w) && p.low_rank.k % 8 == 0;
  return p;
}

}  // namespace anabranch::cuda::few_rows
