// The steps of a call, which operations compose. Steps with a stream run on it. Pushes run on the side stream of the
// exchange and use copy engines only; copies of this rank's own blocks run on its local stream. All steps only enqueue
// work, and can be captured.
//
//     begin_use    on the stream of the caller
//     fork
//       push, signal       for every peer in the order of push_order(), for every phase
//       copy_locally
//     end_copies
//     await_local_copies, await_arrivals
//       ... kernels that read the buffer ...
//     release_use          or collect, which copies the blocks out of the buffer and releases it
//     await_pushes         afterwards the caller may overwrite what was pushed
//
// A small call (small_call.h) is one kernel instead.
#pragma once

#include <cuda_runtime_api.h>

#include "exchange/cuda/exchange.h"
#include "exchange/cuda/kernels.h"

namespace anabranch::cuda {

ab_status begin_use(const ab_exchange& exchange, int buffer, exchange::Operation operation, int64_t bytes,
                    cudaStream_t stream);

// From here on both streams of the exchange run after what the caller has enqueued on `stream` so far.
ab_status fork(const ab_exchange& exchange, cudaStream_t stream);

// Ends the copies of a call on a buffer. The caller's stream must wait for them later, by the next two steps.
ab_status end_copies(const ab_exchange& exchange, int buffer);

ab_status await_pushes(const ab_exchange& exchange, int buffer, cudaStream_t stream);
ab_status await_local_copies(const ab_exchange& exchange, int buffer, cudaStream_t stream);

// await_local_copies and await_pushes.
ab_status join(const ab_exchange& exchange, int buffer, cudaStream_t stream);

// The rank that this rank pushes to in step i, 1 <= i < P. In every step each rank is pushed to by one rank.
int push_order(const ab_exchange& exchange, int step);

// Copies bytes to a buffer of rank `to`, at an offset.
ab_status push(const ab_exchange& exchange, int buffer, int to, int64_t offset, const void* from, int64_t bytes);

// Copies bytes to this rank's own buffer, at an offset.
ab_status copy_locally(const ab_exchange& exchange, int buffer, int64_t offset, const void* from, int64_t bytes);

// Tells rank `to` that all pushes of a phase of the current use are complete.
ab_status signal(const ab_exchange& exchange, int buffer, int phase, int to);

ab_status await_arrivals(const ab_exchange& exchange, const Arrivals& arrivals, cudaStream_t stream);

ab_status release_use(const ab_exchange& exchange, int buffer, cudaStream_t stream);

// Joins all copies and releases all buffers, see AB_EXCHANGE_ALL_BUFFERS. Returns the status of a broken exchange.
ab_status abandon(ab_exchange* exchange, cudaStream_t stream);

}  // namespace anabranch::cuda
