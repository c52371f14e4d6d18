// The plain epilogue: accumulators are rounded and stored.
//
// Each warp has strips of its own in shared memory, 16 rows of 128 bytes with the 128-byte swizzle. It writes its
// accumulators there, a strip at a time, and the copy engine takes a strip to memory while the warp goes on. What lies
// outside the result, or below the rows of the expert, the copy engine leaves out.
#pragma once

#include <type_traits>

#include "core/cuda/access.cuh"
#include "core/cuda/tma.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

constexpr int kStripRows = 16;
constexpr int kStripBytes = kStripRows * kSwizzleBytes;
constexpr int kStrips = 2;  // of a warp

template <class Out>
constexpr int kStripColumns = kSwizzleBytes / static_cast<int>(sizeof(Out));

// Targets that read nothing ahead.
struct NothingAhead {};
class StripWriter;
struct WritesOnly {
  // Whether the epilogue leaves so few registers that gathering must make do with less.
  template <class Shape>
  static constexpr bool kTakesRegisters = false;

  template <class Shape>
  __device__ NothingAhead begin(const StripWriter&, const Tile&, int) const {
    return {};
  }
  template <class Shape>
  __device__ void read_on(NothingAhead) const {}
};

// One warp's way from accumulators to memory. Target: whose elements, `Out`, how many columns there are, and send() of
// a strip to its place.
class StripWriter {
 public:
  // strips: kStrips of kStripBytes, 1024-byte aligned.
  __device__ explicit StripWriter(char* strips) : strips_(shared_address(strips)) {}

  // Rows row, ..., row + 15 of the tile, all its columns. acc: of m64nkColumns.
  template <int kColumns, class Target>
  __device__ void write(const Target& to, const Tile& tile, int row, const float (&acc)[kColumns / 2]) {
    using Out = typename Target::Out;
    if (tile.row + row >= tile.end_row) return;
#pragma unroll
    for (int column = 0; column < kColumns; column += kStripColumns<Out>) {
      if (tile.column + column >= to.columns) return;
      write_strip(to, tile, row, column, acc + column / 2);
    }
  }

  // One strip, the columns from `column` of the tile on. acc: theirs.
  template <class Target>
  __device__ __forceinline__ void write_strip(const Target& to, const Tile& tile, int row, int column,
                                              const float* acc) {
    const uint32_t strip = next_strip();
    fill<typename Target::Out>(strip, acc);
    send(to, strip, tile, row, column);
  }

  // Zeros in the place of write().
  template <int kColumns, class Target>
  __device__ void write_zeros(const Target& to, const Tile& tile, int row) {
    using Out = typename Target::Out;
    if (tile.row + row >= tile.end_row) return;
    for (int column = 0; column < kColumns && tile.column + column < to.columns; column += kStripColumns<Out>) {
      const uint32_t strip = next_strip();
#pragma unroll
      for (int i = 0; i < kStripBytes / 16; i += kWarp) store_shared_zeros(strip + (i + lane_index()) * 16);
      send(to, strip, tile, row, column);
    }
  }

  // The memory of the strips, for a target that writes none.
  __device__ uint32_t strips() const { return strips_; }

  // Before the block ends.
  __device__ void finish() {
    if (lane_index() == 0) wait_for_stores_to_read<0>();
  }

 private:
  __device__ uint32_t next_strip() {
    if (lane_index() == 0) wait_for_stores_to_read<kStrips - 1>();
    __syncwarp();
    const uint32_t strip = strips_ + next_ * kStripBytes;
    next_ = (next_ + 1) % kStrips;
    return strip;
  }

  template <class Out>
  __device__ __forceinline__ void fill(uint32_t strip, const float* acc) {
    const int lane = lane_index();
    if constexpr (sizeof(Out) == 2) {
      // Of four 8x8 matrices at a time, the second stands below the first and the other two to their right.
      const uint32_t place = strip + swizzled(lane % 16, lane / 16);
#pragma unroll
      for (int chunk = 0; chunk < kSwizzleBytes / 16; chunk += 2) {
        const float* values = acc + chunk * 4;
        store_matrices(chunks_on(place, chunk), pack<Out>(values[0], values[1]), pack<Out>(values[2], values[3]),
                       pack<Out>(values[4], values[5]), pack<Out>(values[6], values[7]));
      }
    } else {
      const uint32_t place = strip + swizzled(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
      for (int eight = 0; eight < kStripColumns<Out> / 8; ++eight) {
        const float* values = acc + eight * 4;
        store_shared(chunks_on(place, eight * 2), values[0], values[1]);
        store_shared(chunks_on(place, eight * 2) + 8 * kSwizzleBytes, values[2], values[3]);
      }
    }
  }

  template <class Target>
  __device__ void send(const Target& to, uint32_t strip, const Tile& tile, int row, int column) {
    fence_async_proxy();
    __syncwarp();
    if (lane_index() == 0) {
      to.send(strip, tile, row, column);
      commit_stores();
    }
  }

  uint32_t strips_;
  int next_ = 0;
};

// The result [R, N] of a product over rows.
template <class Out_>
struct RowsOut : WritesOnly {
  using Out = Out_;
  CUtensorMap map;  // row window, boxes of a strip
  int32_t columns;

  __device__ void prefetch() const { prefetch_map(map); }

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingAhead) const {
    writer.write<Shape::kColumns>(*this, tile, row, acc);
  }
  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns>(*this, tile, row);
  }

  __device__ void send(uint32_t strip, const Tile& tile, int row, int column) const {
    store_box(map, strip, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
  }
};

// One of matrices of results.
template <class Out_>
struct MatrixOut {
  using Out = Out_;
  const CUtensorMap& map;  // matrices, boxes of a strip
  int32_t columns;
  int32_t matrix;
  bool adds;  // to what stands there; float only

  __device__ void send(uint32_t strip, const Tile& tile, int row, int column) const {
    const MatrixCoordinates at{tile.column + column, tile.row + row, matrix};
    if (std::is_same_v<Out, float> && adds) {
      add_box(map, strip, at);
    } else {
      store_box(map, strip, at);
    }
  }
};

// The result [E, D, N] of a product over terms, and partial results.
template <class Element>
struct WeightsOut : WritesOnly {
  CUtensorMap map;       // matrices of Element, or float
  CUtensorMap partials;  // matrices of float
  int32_t columns;
  bool wide;  // float
  bool adds;  // to what stands there, if wide

  __device__ void prefetch() const {
    prefetch_map(map);
    prefetch_map(partials);
  }

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingAhead) const {
    constexpr int kColumns = Shape::kColumns;
    const bool whole = tile.partial == kWhole;
    if (whole && !wide) {
      writer.write<kColumns>(MatrixOut<Element>{map, columns, tile.expert, false}, tile, row, acc);
    } else {
      writer.write<kColumns>(
          MatrixOut<float>{whole ? map : partials, columns, whole ? tile.expert : tile.partial, whole && adds}, tile,
          row, acc);
    }
  }
  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    constexpr int kColumns = Shape::kColumns;
    if (!wide) {
      writer.write_zeros<kColumns>(MatrixOut<Element>{map, columns, tile.expert, false}, tile, row);
    } else if (!adds) {
      writer.write_zeros<kColumns>(MatrixOut<float>{map, columns, tile.expert, false}, tile, row);
    }
  }
};

}  // namespace anabranch::cuda
