// Chooses the kernel, its teams and its slabs for a small-M GEMM with packed weights, and launches it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts/few_rows/packed_product.cuh"

namespace anabranch::cuda::few_rows {

// The most shared memory of a CTA whose rows of x do not fit with all of k. The L1 cache gets the rest of the SM's
// memory. It holds the lines of weights that are being loaded.
constexpr int64_t kSlabBytes = 132 << 10;

// Launches the kernel of one shape. Returns AB_UNSUPPORTED if the device has too little shared memory for it.
template <class Format, class Element, class Shape, bool kAligned, class Epilogue>
ab_status launch_packed_product(const char* name, PackedProduct p, const Epilogue& epilogue, cudaStream_t stream) {
  Device device;
  AB_RETURN_IF_ERROR(find_device(name, &device));
  const int64_t ranges = set_units<Shape::kRows>(&p);
  const size_t others =
      sizeof(float4) * Shape::kThreads * Shape::kRowGroups + sizeof(UnitRows) * static_cast<size_t>(ranges);
  // The greatest k of a slab in a number of bytes of shared memory.
  const auto depth_in = [&](int64_t bytes) {
    return ((bytes - static_cast<int64_t>(kStaticBytes + others)) / Shape::kRows - slab_row_bytes(0)) / 2;
  };
  const int64_t k = (p.main.k + kChunkDepth - 1) / kChunkDepth * kChunkDepth;
  const bool fits = k <= depth_in(device.max_block_shared_bytes);
  const int64_t max_depth = depth_in(std::min<int64_t>(device.max_block_shared_bytes, kSlabBytes));
  // Chooses the team for which the CTA with the most rounds takes the least time, if all experts have rows. The unit is
  // half the time of a chunk. kOfRound, the rest of a round's time, is an estimate.
  constexpr int64_t kOfRound = 3;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t used = std::min<int64_t>(p.groups.R, p.groups.E);
  int64_t least = INT64_MAX;
  for (int bits = 0; bits <= kMaxTeamBits; ++bits) {
    const int team = 1 << bits;
    if (!fits && Shape::kAhead * kChunkDepth * team > max_depth) break;
    const int64_t rounds = ceil_div(p.slices, Shape::kWarps / team);
    const int64_t chunks = ceil_div(p.main.k, kChunkDepth * team);
    const int64_t time = ceil_div(used * rounds, int64_t{device.multiprocessors}) * (2 * chunks + kOfRound);
    if (time >= least) continue;
    least = time;
    p.team = team;
    p.team_bits = bits;
    p.rounds = static_cast<int32_t>(rounds);
  }
  if (p.rounds == 0) return error(AB_UNSUPPORTED, "%s: the device has too little shared memory", name);
  // If k does not fit, a slab is a multiple of a group of chunks, so that no group belongs to two slabs.
  const int64_t step = Shape::kAhead * kChunkDepth * p.team;
  p.depth = static_cast<int32_t>(fits ? k : max_depth / step * step);
  p.has_one_source = p.main.gathers && p.map.sources() == 1 && fits;
  p.by_rounds = Divisor(p.rounds);
  const int64_t blocks = std::min<int64_t>(ranges * p.rounds, device.multiprocessors);
  p.by_blocks = Divisor(static_cast<int32_t>(blocks));
  const size_t shared = static_cast<size_t>(Shape::kRows) * slab_row_bytes(p.depth) + others;
  return launch(name, few_rows_packed_product<Format, Element, Shape, kAligned, Epilogue>,
                {blocks, Shape::kThreads, shared, stream, true}, p, epilogue);
}

// Whether data is 16-byte aligned.
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Chooses the kernel by format, dtype of x, alignment and rows per expert, and launches it.
template <class Epilogue>
ab_status launch_packed_product(const char* name, int32_t dtype, const PackedProduct& p, const Epilogue& epilogue,
                                cudaStream_t stream) {
  const auto with_types = [&]<class Format, class Element>() {
    const auto launch = [&]<int kRowGroups, bool kAligned>() {
      return launch_packed_product<Format, Element, PackedShape<Format, kRowGroups>, kAligned>(name, p, epilogue,
                                                                                               stream);
    };
    if (!is_aligned(p.packed.values) || !is_aligned(p.main.x)) return launch.template operator()<1, false>();
    const int64_t rows = rows_of_range(p.groups.R, p.groups.E);
    return rows == 8    ? launch.template operator()<1, true>()
           : rows == 16 ? launch.template operator()<2, true>()
                        : launch.template operator()<4, true>();
  };
  const auto with_format = [&]<class Format>() {
    return dtype == AB_BFLOAT16 ? with_types.template operator()<Format, BFloat16>()
                                : with_types.template operator()<Format, Float16>();
  };
  return p.packed.dtype == AB_FLOAT4_E2M1X2 ? with_format.template operator()<Fp4Format>()
                                            : with_format.template operator()<Fp8Format>();
}

// The GEMM `plain` with packed weights. Its field main.w is not used. FP8: first_column and the number of columns are
// multiples of 16, so that the columns of a warp are in one block.
inline PackedProduct packed_product(const Product& plain, const PackedMatrices& packed, int64_t first_column) {
  PackedProduct p{plain, packed, static_cast<int32_t>(first_column)};
  p.has_aligned_chunks = is_aligned(p.low_rank.x) && is_aligned(p.low_rank.w) && p.low_rank.k % 8 == 0;
  return p;
}

}  // namespace anabranch::cuda::few_rows
