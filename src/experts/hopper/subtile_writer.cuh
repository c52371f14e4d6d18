// Stores accumulators to device memory.
//
// Each warp has its own shared-memory buffers for subtiles of its results: 16 rows of 128 bytes with the 128-byte
// swizzle. It writes accumulators there, one subtile at a time, and a TMA store copies the subtile to device memory
// while the warp continues. TMA skips elements outside the result or after the rows of the expert.
//
// With one buffer, the warp would wait for TMA to read each subtile, so its lanes copy the subtile themselves.
#pragma once

#include "core/cuda/access.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/tma.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

constexpr int kSubtileRows = 16;
constexpr int kSubtileBytes = kSubtileRows * kSwizzleBytes;

template <class Out>
constexpr int kSubtileColumns = kSwizzleBytes / static_cast<int>(sizeof(Out));

// A subtile of 16-bit elements, packed in pairs in accumulator order.
using SubtileWords = uint32_t[kSwizzleBytes / 8];

template <class Out>
__device__ __forceinline__ void pack_subtile(const float* values, SubtileWords& words) {
#pragma unroll
  for (int i = 0; i < kSwizzleBytes / 8; ++i) words[i] = pack<Out>(values[2 * i], values[2 * i + 1]);
}

// The prefetched data of epilogues without prefetches.
struct EmptyPrefetch {};
class SubtileWriter;
struct NoPrefetch {
  // kNeedsRegisters: the epilogue needs so many registers that gathering producers get fewer. kNeedsPositionRegister:
  // it leaves no register for the tile index. kWritesFromOneBuffer: its destinations have `stored`.
  template <class Shape>
  static constexpr bool kNeedsRegisters = false;
  static constexpr bool kNeedsPositionRegister = false;
  static constexpr bool kWritesFromOneBuffer = false;
  static constexpr bool kDefersStores = false;

  template <class Shape>
  __device__ EmptyPrefetch begin_prefetch(const SubtileWriter&, const Tile&, int) const {
    return {};
  }
  template <class Shape>
  __device__ void finish_prefetch(EmptyPrefetch) const {}
};

// A result with rows in whole 16-byte chunks, for a writer with one buffer.
struct StoredRows {
  char* data;
  int64_t row_bytes;
};

// Stores the results of one warp. Destination: element type `Out`, number of columns, send() of a subtile, and `stored`
// for a writer with one buffer.
class SubtileWriter {
 public:
  // subtiles: kBuffers buffers of kSubtileBytes, 1024-byte aligned.
  template <int kBuffers>
  __device__ explicit SubtileWriter(char (&subtiles)[kBuffers][kSubtileBytes])
      : subtiles_(shared_address(subtiles)), buffers_(kBuffers) {
    static_assert(kBuffers == 1 || kBuffers == 2);
  }

  // Reconstructs the writer of a warp. So it takes no registers during the main loop.
  template <int kBuffers>
  static __device__ __forceinline__ SubtileWriter reopen(char (&subtiles)[kBuffers][kSubtileBytes]) {
    if (lane_index() == 0) wait_for_stores_to_read<0>();
    __syncwarp();
    return SubtileWriter(subtiles);
  }

  // Writes rows row, ..., row + 15 of the tile, all its columns. acc: accumulators of m64nkColumns.
  template <int kColumns, class Destination>
  __device__ void write(const Destination& to, const Tile& tile, int row, const float (&acc)[kColumns / 2]) {
    using Out = typename Destination::Out;
    if (tile.row + row >= tile.end_row) return;
#pragma unroll
    for (int column = 0; column < kColumns; column += kSubtileColumns<Out>) {
      if (tile.column + column >= to.columns) return;
      write_subtile(to, tile, row, column, acc + column / 2);
    }
  }

  // Writes one subtile, from `column` of the tile on. acc: its accumulators.
  template <class Destination>
  __device__ __forceinline__ void write_subtile(const Destination& to, const Tile& tile, int row, int column,
                                                const float* acc) {
    const uint32_t subtile = next_subtile();
    fill<typename Destination::Out>(subtile, acc);
    send(to, subtile, tile, row, column);
  }

  // Writes one subtile of packed 16-bit elements.
  template <class Destination>
  __device__ __forceinline__ void write_packed_subtile(const Destination& to, const Tile& tile, int row, int column,
                                                       const SubtileWords& words) {
    const uint32_t subtile = next_subtile();
    fill_packed(subtile, [&](int word) { return words[word]; });
    send(to, subtile, tile, row, column);
  }

  // Writes zeros instead of accumulators.
  template <int kColumns, class Destination>
  __device__ void write_zeros(const Destination& to, const Tile& tile, int row) {
    using Out = typename Destination::Out;
    if (tile.row + row >= tile.end_row) return;
    for (int column = 0; column < kColumns && tile.column + column < to.columns; column += kSubtileColumns<Out>) {
      const uint32_t subtile = next_subtile();
#pragma unroll
      for (int i = 0; i < kSubtileBytes / 16; i += kWarp) store_shared_zeros(subtile + (i + lane_index()) * 16);
      send(to, subtile, tile, row, column);
    }
  }

  // The memory of the subtiles, for epilogues that use it for other data.
  __device__ uint32_t subtiles() const { return subtiles_; }

  // Must be called before the CTA exits.
  __device__ void finish() {
    if (lane_index() == 0) wait_for_stores_to_read<0>();
  }

 private:
  __device__ uint32_t next_subtile() {
    if (buffers_ == 2 && lane_index() == 0) wait_for_stores_to_read<1>();
    __syncwarp();
    const uint32_t subtile = subtiles_ + next_ * kSubtileBytes;
    next_ = (next_ + 1) % buffers_;
    return subtile;
  }

  // word(i): the lane's elements 2 i and 2 i + 1.
  template <class WordAt>
  __device__ __forceinline__ void fill_packed(uint32_t subtile, const WordAt& word) {
    // Each step stores four 8x8 matrices: the second is below the first, the other two are to their right.
    const uint32_t place = subtile + swizzled(lane_index() % 16, lane_index() / 16);
#pragma unroll
    for (int chunk = 0; chunk < kSwizzleBytes / 16; chunk += 2) {
      const int first = chunk * 2;
      store_matrices(advance_chunks(place, chunk), word(first), word(first + 1), word(first + 2), word(first + 3));
    }
  }

  template <class Out>
  __device__ __forceinline__ void fill(uint32_t subtile, const float* acc) {
    if constexpr (sizeof(Out) == 2) {
      fill_packed(subtile, [acc](int word) { return pack<Out>(acc[2 * word], acc[2 * word + 1]); });
    } else {
      const int lane = lane_index();
      const uint32_t place = subtile + swizzled(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
      for (int eight = 0; eight < kSubtileColumns<Out> / 8; ++eight) {
        const float* values = acc + eight * 4;
        store_shared(advance_chunks(place, eight * 2), values[0], values[1]);
        store_shared(advance_chunks(place, eight * 2) + 8 * kSwizzleBytes, values[2], values[3]);
      }
    }
  }

  template <class Destination>
  __device__ void send(const Destination& to, uint32_t subtile, const Tile& tile, int row, int column) {
    if constexpr (requires { to.stored; }) {
      if (buffers_ == 1) return copy(to, subtile, tile, row, column);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_index() == 0) {
      to.send(subtile, tile, row, column);
      commit_stores();
    }
  }

  // Copies a subtile to device memory: eight lanes per row, 16 bytes each.
  template <class Destination>
  __device__ __forceinline__ void copy(const Destination& to, uint32_t subtile, const Tile& tile, int row, int column) {
    constexpr int kSize = sizeof(typename Destination::Out);
    constexpr int kLanes = kSwizzleBytes / 16;  // per row
    constexpr int kRowsAtOnce = kWarp / kLanes;
    const int first = lane_index() / kLanes;
    const int chunk = lane_index() % kLanes;
    const int32_t first_row = tile.row + row + first;
    const int32_t first_column = tile.column + column + chunk * (16 / kSize);
    char* at = to.stored.data + first_row * to.stored.row_bytes + int64_t{first_column} * kSize;
    const int32_t rows = first_column < to.columns ? tile.end_row - first_row : 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSubtileRows / kRowsAtOnce; ++i, at += kRowsAtOnce * to.stored.row_bytes) {
      const auto words = load_shared<uint4>(subtile + swizzled(first + i * kRowsAtOnce, chunk));
      if (i * kRowsAtOnce < rows) *reinterpret_cast<uint4*>(at) = words;
    }
  }

  uint32_t subtiles_;
  int buffers_;  // a constant wherever the constructor is inlined
  int next_ = 0;
};

}  // namespace anabranch::cuda::hopper
