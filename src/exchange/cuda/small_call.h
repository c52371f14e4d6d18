// A call with small blocks, as one kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "anabranch/types.h"
#include "exchange/check.h"
#include "exchange/protocol.h"

namespace anabranch::cuda {

// A tensor of a call. Its blocks lie in the buffers at `offset`.
struct SmallBlocks {
  int64_t bytes;   // of a block
  int64_t stride;  // the block for rank d begins at x + d * stride
  const char* x;
  char* out;  // [P][bytes]
  int64_t offset;
  int64_t slice_bytes;  // set by launch_small_call()
};

struct SmallCall {
  exchange::Operation operation;
  int buffer;
  int64_t bytes;                      // of the blocks of all tensors
  char* places[exchange::kMaxRanks];  // the buffer of each rank, as this rank accesses it
  int count;                          // of tensors
  SmallBlocks tensors[1 + exchange::kMoreTensors];
};

// All steps of a use: waits for the permission of the peers, pushes, waits for the blocks of the peers, copies the
// blocks of all ranks to `out`, or fills it with bytes 0xff if the exchange is broken, and releases the buffer.
ab_status launch_small_call(const exchange::Group& group, SmallCall call, cudaStream_t stream);

// A part of load_kernels().
ab_status load_small_call();

}  // namespace anabranch::cuda
