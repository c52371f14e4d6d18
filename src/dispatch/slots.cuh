// Lists, in shared memory, the slots of a token that satisfy a condition.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "dispatch/maps.h"

namespace anabranch::cuda {

struct SlotList {
  static constexpr int kBatch = 4;  // concurrent reads of 32 slots each
  static constexpr int kCapacity = (kBatch + 1) * kWarp;
};

// Calls `use` with lists that together contain, in order, the slots of token t that `find` accepts. All lanes take
// part.
//
//   find(slot, row)        whether to list the slot; `row`, its entry in row_of_slot, may have any value
//   put(place, slot, row)  stores it as entry `place` < SlotList::kCapacity; one lane calls it
//   use(count)             reads entries 0 ... count-1; called by all lanes, count >= 1
template <class Find, class Put, class Use>
__device__ __forceinline__ void list_slots(const Maps& maps, int64_t t, const Find& find, const Put& put,
                                           const Use& use) {
  constexpr int kBatch = SlotList::kBatch;
  const unsigned K = static_cast<unsigned>(maps.K);
  const int32_t first = static_cast<int32_t>(t * maps.K);
  const unsigned lane = static_cast<unsigned>(lane_index());
  unsigned next = 0;
  do {
    int count = 0;
    for (; next < K && count <= SlotList::kCapacity - kBatch * kWarp; next += kBatch * kWarp) {
      int32_t rows[kBatch];
      bool listed[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned k = next + i * kWarp + lane;
        rows[i] = k < K ? maps.row_of_slot[first + k] : -1;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned k = next + i * kWarp + lane;
        listed[i] = k < K && find(first + static_cast<int32_t>(k), rows[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned lanes = __ballot_sync(kAllLanes, listed[i]);
        const unsigned k = next + i * kWarp + lane;
        if (listed[i]) put(count + __popc(lanes & ((1u << lane) - 1u)), first + static_cast<int32_t>(k), rows[i]);
        count += __popc(lanes);
      }
    }
    __syncwarp();
    if (count > 0) use(count);
    __syncwarp();
  } while (next < K);
}

}  // namespace anabranch::cuda
