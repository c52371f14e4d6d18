// A call with small blocks, as one kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "anabranch/types.h"
#include "exchange/protocol.h"

namespace anabranch::cuda {

struct SmallCall {
  exchange::Operation operation;
  int buffer;
  int64_t bytes;   // of a block, at most exchange::kSmallBytes
  int64_t stride;  // the block for rank d begins at x + d * stride
  const char* x;
  char* out;                          // [P][bytes]
  char* places[exchange::kMaxRanks];  // the buffer of each rank, as this rank accesses it
};

// All steps of a use: waits for the permission of the peers, pushes, waits for the blocks of the peers, copies the
// blocks of all ranks to `out`, or fills it with bytes 0xff if the exchange is broken, and releases the buffer.
ab_status launch_small_call(const exchange::Group& group, const SmallCall& call, cudaStream_t stream);

// A part of load_kernels().
ab_status load_small_call();

}  // namespace anabranch::cuda
