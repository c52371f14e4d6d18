// The kernels of exchanges. Launch functions return before the kernel runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "anabranch/types.h"
#include "exchange/protocol.h"

namespace anabranch::cuda {

// Loads all kernels on the current device. A kernel that is loaded by its first launch may wait for the device, which
// may wait for a rank whose call has not been made yet.
ab_status load_kernels();

// Protocol::await_release() and begin().
ab_status launch_begin(const exchange::Group& group, int buffer, exchange::Operation operation, int64_t bytes,
                       cudaStream_t stream);

// Protocol::await_arrival() for a phase and some sources. The flags of phases after the first are cleared, since not
// every use pushes them. If the exchange is broken, the memory is filled with bytes 0xff.
struct Arrivals {
  int buffer;
  int phase = 0;
  uint32_t sources = ~0u;  // a bit per rank
  char* memory = nullptr;
  int64_t bytes = 0;
};
ab_status launch_await(const exchange::Group& group, const Arrivals& arrivals, cudaStream_t stream);

// Copies the blocks of all ranks, which have arrived, to `out`, or fills it with bytes 0xff if the exchange is broken.
// Then releases the buffer.
struct Collection {
  int buffer;
  const char* arrived;  // [P][bytes]; the block of this rank is not read
  const char* own;      // [bytes]
  char* out;            // [P][bytes]
  int64_t bytes;
};
ab_status launch_collect(const exchange::Group& group, const Collection& collection, cudaStream_t stream);

// Protocol::signal() of a phase of the current use to all peers, for data that earlier kernels of the stream pushed.
ab_status launch_signal(const exchange::Group& group, int buffer, int phase, cudaStream_t stream);

// Protocol::release() for all ranks.
ab_status launch_release(const exchange::Group& group, int buffer, cudaStream_t stream);

// Releases a buffer after an error, if it is in use. The kernel first waits until all peers have begun this use.
ab_status launch_abandon(const exchange::Group& group, int buffer, cudaStream_t stream);

}  // namespace anabranch::cuda
