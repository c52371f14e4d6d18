// Selects groups of experts, where each group is a whole number of lanes.
#pragma once

#include "core/cuda/warp.cuh"
#include "router/forward.h"

namespace anabranch::cuda {

// The two best values of a group, over the items of a lane and then over the lanes of the group.
struct GroupBest {
  float best = -INFINITY;
  float second = -INFINITY;
  float nan_or_zero = 0.0f;  // NaN if a value is infinite or NaN, else 0

  __device__ __forceinline__ void add(float value) {
    second = fmaxf(second, fminf(best, value));
    best = fmaxf(best, value);
    nan_or_zero += value - value;
  }

  template <int kItems>
  __device__ __forceinline__ void add_all(const float (&values)[kItems]) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) add(values[i]);
  }

  // Whether the lane's group is selected: fewer than group_topk other groups are better.
  template <int kLanes>
  __device__ __forceinline__ bool is_selected(const RouterForward& op, int lane) {
    const int group_lanes = kLanes / op.num_groups;
    for (int distance = 1; distance < group_lanes; distance *= 2) {
      const float other_best = __shfl_xor_sync(kAllLanes, best, distance);
      const float other_second = __shfl_xor_sync(kAllLanes, second, distance);
      second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
      best = fmaxf(best, other_best);
    }
    const float score = op.group_score_topk == 1 ? best : best + second;
    const int group = lane / group_lanes;
    int better = 0;
    for (int other = 0; other < op.num_groups; ++other) {
      const float other_score = __shfl_sync(kAllLanes, score, other * group_lanes, kLanes);
      better += other_score > score || (other_score == score && other < group);
    }
    return better < op.group_topk;
  }
};

}  // namespace anabranch::cuda
