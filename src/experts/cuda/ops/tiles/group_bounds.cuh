// First and last rows of groups, whose sizes are known on the device only.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/groups.h"

namespace anabranch::cuda {

// Processes 32 groups at a time, one per lane, starting with groups 0 ... 31. Used by one whole warp.
class GroupBounds {
 public:
  __device__ explicit GroupBounds(const Groups& groups) : groups_(groups) { read(); }

  __device__ void move_on() {
    first_ += kWarp;
    read();
  }

  __device__ int32_t first() const { return first_; }  // the group of lane 0
  __device__ int32_t begin() const { return begin_; }  // of the lane's group
  __device__ int32_t end() const { return end_; }

 private:
  __device__ void read() {
    const auto R = static_cast<uint32_t>(groups_.R);
    const int32_t end_of_all = __shfl_sync(kAllLanes, end_, kWarp - 1);  // of the groups read so far
    const int32_t group = first_ + lane_index();
    uint32_t size = group == groups_.E ? R : 0;
    if (group < groups_.E) size = static_cast<uint32_t>(min(max(groups_.sizes[group], 0), groups_.R));
    uint32_t end = min(size + (lane_index() == 0 ? static_cast<uint32_t>(end_of_all) : 0u), R);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_index() >= distance) end = min(end + before, R);  // both at most R < 2^31
    }
    const uint32_t before = __shfl_up_sync(kAllLanes, end, 1);
    begin_ = lane_index() == 0 ? end_of_all : static_cast<int32_t>(before);
    end_ = static_cast<int32_t>(end);
  }

  Groups groups_;
  int32_t first_ = 0;
  int32_t begin_ = 0;
  int32_t end_ = 0;
};

}  // namespace anabranch::cuda
