// Copies between float tensors of different dtypes and axis orders.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "anabranch/types.h"
#include "core/floats.h"

namespace anabranch::cuda {

// to[i, j, k, l] = from[i, j, k, l], rounded to nearest even; or with `adds` to[...] += from[...]. Strides are in
// elements. The tensors must not overlap.
//
// group_sizes: matrices i whose group is empty are not copied; `to` must have a larger stride for i than for the other
// axes.
struct StridedCopy {
  Floats from;
  Floats to;
  int64_t shape[4] = {};
  int64_t from_strides[4] = {};
  int64_t to_strides[4] = {};
  bool adds = false;
  const int32_t* group_sizes = nullptr;  // [shape[0]] on the device, or nullptr: all are copied
};

// Enqueues all copies, in as few launches as their dtypes and axes allow.
ab_status copy(std::span<const StridedCopy> copies, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
