// Rows of x in shared memory: all of k, or a slab of it at a time.
//
// The 4 lanes of a column have adjacent pieces of weights, of kCodes k each, and a step takes 8 k of each lane. Rows of
// x consist of 16-byte chunks of 8 k. In shared memory the chunks of 4 pieces are in the order of the steps, so that 4
// lanes read 64 adjacent bytes. The 8 k of a chunk have the order of the words that a format decodes to. Rows are 64
// bytes more than a multiple of 128 apart, so that 8 lanes have no bank conflict.
#pragma once

#include <cstdint>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/pairs.cuh"
#include "core/cuda/warp.cuh"
#include "experts/few_rows/product.cuh"

namespace anabranch::cuda::few_rows {

// 16 bytes of 16-bit elements, of which `count` exist; the rest are zeros.
__device__ __forceinline__ uint4 load_elements(const void* from, int count) {
  const auto* const elements = static_cast<const uint16_t*>(from);
  const auto pair = [&](int i) {
    const uint32_t low = 2 * i < count ? elements[2 * i] : 0u;
    return low | (2 * i + 1 < count ? static_cast<uint32_t>(elements[2 * i + 1]) << 16 : 0u);
  };
  return {pair(0), pair(1), pair(2), pair(3)};
}

// The distance of rows in shared memory, in bytes. depth: the k of a slab, a multiple of 128.
constexpr int slab_row_bytes(int depth) { return depth * 2 + 64; }

// Words of two elements: i and i + 4 of eight.
__device__ __forceinline__ uint4 apart(const uint4& eight) {
  return {select_bytes<0x5410>(eight.x, eight.z), select_bytes<0x7632>(eight.x, eight.z),
          select_bytes<0x5410>(eight.y, eight.w), select_bytes<0x7632>(eight.y, eight.w)};
}

// Copies k = begin, ..., begin + depth - 1 of kRows rows to `memory`; rows that do not exist and k past the end are
// zeros. Called by all threads of the CTA, which need a barrier before and after it. source_of(i): the row of x for row
// i of the slab; -1: none.
template <class Format, int kRows, int kThreads, bool kAligned, class SourceOf>
__device__ __forceinline__ void load_slab(const Operands& x, const SourceOf& source_of, int begin, int depth,
                                          char* memory) {
  constexpr int kThreadsPerRow = kThreads / kRows;
  constexpr int kSteps = Format::kCodes / 8;
  static_assert(kThreadsPerRow % (4 * kSteps) == 0, "a thread has the same place in all pieces");
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int slab_row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const int32_t source = source_of(slab_row);
  const bool exists = source >= 0;
  const int in_pieces = lane % (4 * kSteps);
  const int place = lane - in_pieces + in_pieces % kSteps * 4 + in_pieces / kSteps;
  char* to = memory + slab_row * slab_row_bytes(depth) + place * 16;
  const char* from = static_cast<const char*>(x.x) + (int64_t{max(source, 0)} * x.k + begin) * 2 + lane * 16;
  const int chunks = exists ? min(depth, x.k - begin) / 8 : 0;
  if constexpr (kAligned && !Format::kApart) {
    auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll 4
    for (int i = lane; i < depth / 8; i += kThreadsPerRow) {
      copy_async_16(address, from, i < chunks);
      address += kThreadsPerRow * 16;
      from += kThreadsPerRow * 16;
    }
    end_copy_group();
    wait_for_copies<0>();
  } else {
#pragma unroll(kAligned ? 8 : 1)
    for (int i = lane; i < depth / 8; i += kThreadsPerRow) {
      uint4 eight{};
      if constexpr (kAligned) {
        if (i < chunks) eight = *reinterpret_cast<const uint4*>(from);
      } else {
        eight = load_elements(from, i < chunks ? 8 : 0);
      }
      *reinterpret_cast<uint4*>(to) = Format::kApart ? apart(eight) : eight;
      to += kThreadsPerRow * 16;
      from += kThreadsPerRow * 16;
    }
  }
}

}  // namespace anabranch::cuda::few_rows
