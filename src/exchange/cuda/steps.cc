#include "exchange/cuda/steps.h"

#include "exchange/cuda/arena.h"

namespace anabranch::cuda {

ab_status begin_use(const ab_exchange& exchange, int buffer, exchange::Operation operation, int64_t bytes,
                    cudaStream_t stream) {
  return launch_begin(exchange.group, buffer, operation, bytes, stream);
}

ab_status fork(const ab_exchange& exchange, cudaStream_t stream) {
  AB_RETURN_IF_CUDA_ERROR("fork", cudaEventRecord(exchange.arena.fork, stream));
  AB_RETURN_IF_CUDA_ERROR("fork", cudaStreamWaitEvent(exchange.arena.side, exchange.arena.fork, 0));
  AB_RETURN_IF_CUDA_ERROR("fork", cudaStreamWaitEvent(exchange.arena.local, exchange.arena.fork, 0));
  return ok();
}

ab_status end_copies(const ab_exchange& exchange, int buffer) {
  AB_RETURN_IF_CUDA_ERROR("join", cudaEventRecord(exchange.arena.pushed[buffer], exchange.arena.side));
  AB_RETURN_IF_CUDA_ERROR("join", cudaEventRecord(exchange.arena.copied[buffer], exchange.arena.local));
  return ok();
}

ab_status await_pushes(const ab_exchange& exchange, int buffer, cudaStream_t stream) {
  AB_RETURN_IF_CUDA_ERROR("join", cudaStreamWaitEvent(stream, exchange.arena.pushed[buffer], 0));
  return ok();
}

ab_status await_local_copies(const ab_exchange& exchange, int buffer, cudaStream_t stream) {
  AB_RETURN_IF_CUDA_ERROR("join", cudaStreamWaitEvent(stream, exchange.arena.copied[buffer], 0));
  return ok();
}

ab_status join(const ab_exchange& exchange, int buffer, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(await_local_copies(exchange, buffer, stream));
  return await_pushes(exchange, buffer, stream);
}

int push_order(const ab_exchange& exchange, int step) { return (exchange.shape.rank + step) % exchange.shape.ranks; }

ab_status push(const ab_exchange& exchange, int buffer, int to, int64_t offset, const void* from, int64_t bytes) {
  if (bytes == 0) return ok();
  char* const place = buffer_of(exchange, to, buffer) + offset;
  AB_RETURN_IF_CUDA_ERROR(
      "push", cudaMemcpyAsync(place, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, exchange.arena.side));
  return ok();
}

ab_status copy_locally(const ab_exchange& exchange, int buffer, int64_t offset, const void* from, int64_t bytes) {
  char* const place = buffer_of(exchange, exchange.shape.rank, buffer) + offset;
  if (bytes == 0 || place == from) return ok();
  AB_RETURN_IF_CUDA_ERROR(
      "copy", cudaMemcpyAsync(place, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, exchange.arena.local));
  return ok();
}

// The flag is a copy, not a kernel: a copy engine needs no SM, and the word of the use is read on the device when the
// copy runs, so the call can be replayed. Stream order is enough to order the flag after the data for a reader on
// another device: an operation of a stream begins when the writes of the previous one are complete, since it may read
// them, from any memory that they went to. Both writes go to the memory of rank `to`, whose load of the flag has
// acquire semantics, so a reader that sees the flag sees the data. A word is written at once: it has 8 aligned bytes.
ab_status signal(const ab_exchange& exchange, int buffer, int phase, int to) {
  const exchange::Group& group = exchange.group;
  AB_RETURN_IF_CUDA_ERROR("signal", cudaMemcpyAsync(&group.flags[to]->arrived[buffer][phase][group.rank],
                                                    &exchange.arena.flags->use[buffer], sizeof(exchange::Word),
                                                    cudaMemcpyDeviceToDevice, exchange.arena.side));
  return ok();
}

ab_status await_arrivals(const ab_exchange& exchange, const Arrivals& arrivals, cudaStream_t stream) {
  return launch_await(exchange.group, arrivals, stream);
}

ab_status release_use(const ab_exchange& exchange, int buffer, cudaStream_t stream) {
  return launch_release(exchange.group, buffer, stream);
}

ab_status abandon(ab_exchange* exchange, cudaStream_t stream) {
  std::lock_guard lock(exchange->calls);
  constexpr int kBuffer = 0;                    // the events of any buffer follow all copies so far
  AB_RETURN_IF_ERROR(fork(*exchange, stream));  // joins a capture of the stream
  AB_RETURN_IF_ERROR(end_copies(*exchange, kBuffer));
  AB_RETURN_IF_ERROR(join(*exchange, kBuffer, stream));
  AB_RETURN_IF_ERROR(check_failure(*exchange));
  for (int buffer = 0; buffer < exchange::kBuffers; ++buffer) {
    AB_RETURN_IF_ERROR(launch_abandon(exchange->group, buffer, stream));
  }
  return ok();
}

}  // namespace anabranch::cuda
