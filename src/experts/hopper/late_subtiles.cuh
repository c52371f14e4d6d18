// Deferred stores: results that are stored during the main loop of the next tile.
//
// With cooperative consumers, no warpgroup issues MMAs while they store their tile, and storing takes longer than
// rounding. So an epilogue may hold its subtiles in registers, packed to 16 bits. During the main loop of the next
// tile, one subtile is stored after the MMAs of each k-block have been issued.
#pragma once

#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// Destination of a warp's subtiles. It is in shared memory because accumulators and subtiles take all registers.
struct LatePlace {
  int32_t row;
  int32_t end_row;
  int32_t column;
};

// The kCount subtiles of one warp and tile. All lanes call the methods together.
template <int kCount_>
class LateSubtiles {
 public:
  static constexpr int kCount = kCount_;

  // place: the warp's entry in shared memory.
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

  __device__ __forceinline__ bool any_left() const { return next_ < kCount; }

  // Writes the next subtile, if any, by epilogue.write_deferred(writer, tile, row, column, words).
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
        epilogue.write_deferred(writer, tile, 0, i * kColumns, words_[i]);
        next_ = i + 1;
      }
    }
  }

 private:
  SubtileWords words_[kCount > 0 ? kCount : 1];
  int next_ = kCount;
};

}  // namespace anabranch::cuda::hopper
