// Results that are stored while the products of the next tile run.
//
// Where both warpgroups work on one tile, nothing multiplies while they store it, and the way to memory takes longer
// than rounding. So an epilogue may keep its subtiles in registers, packed to 16 bits, of which the main loop of the
// next tile stores one after each k-block's products have begun.
#pragma once

#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// Where a warp's subtiles go, in shared memory: accumulators and subtiles leave no registers for it.
struct LatePlace {
  int32_t row;
  int32_t end_row;
  int32_t column;
};

// The kCount subtiles that a warp has of a tile. Its lanes use it together.
template <int kCount_>
class LateSubtiles {
 public:
  static constexpr int kCount = kCount_;

  // place: the warp's.
  __device__ __forceinline__ void begin(const Tile& tile, int row, volatile LatePlace& place) {
    __syncwarp();
    if (lane_index() == 0) {
      place.row = tile.row + row;
      place.end_row = tile.end_row;
      place.column = tile.column;
    }
    __syncwarp();
    next_ = 0;
  }
  __device__ __forceinline__ SubtileWords& words(int subtile) { return words_[subtile]; }

  __device__ __forceinline__ bool are_left() const { return next_ < kCount; }

  // If one is left, by epilogue.write_kept(writer, tile, row, column, words).
  template <int kColumns, class Epilogue>
  __device__ __forceinline__ void write_next(const Epilogue& epilogue, SubtileWriter& writer,
                                             const volatile LatePlace& place) {
    const int next = next_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i == next) {
        Tile tile{};
        tile.row = place.row;
        tile.end_row = place.end_row;
        tile.column = place.column;
        epilogue.write_kept(writer, tile, 0, i * kColumns, words_[i]);
        next_ = i + 1;
      }
    }
  }

 private:
  SubtileWords words_[kCount > 0 ? kCount : 1];
  int next_ = kCount;
};

}  // namespace anabranch::cuda::hopper
