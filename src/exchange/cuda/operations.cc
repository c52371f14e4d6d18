// ab_cuda_exchange_all_gather, ab_cuda_exchange_all_to_all and ab_cuda_exchange_release.
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "exchange/cuda/steps.h"

namespace anabranch::cuda {
namespace {

using exchange::Call;

ab_status check_exchange(const ab_exchange* exchange) {
  if (exchange == nullptr) {
    return AB_INVALID("exchange: got NULL, expected an exchange of ab_cuda_exchange_create");
  }
  if (!exchange->connected) {
    return AB_INVALID("exchange: got an exchange that is not connected, expected ab_cuda_exchange_connect first");
  }
  int device = 0;
  AB_RETURN_IF_CUDA_ERROR("cudaGetDevice", cudaGetDevice(&device));
  if (device != exchange->arena.device) {
    return AB_INVALID("exchange: got a call on device %d, expected its device %d", device, exchange->arena.device);
  }
  return check_failure(*exchange);
}

ab_status push_blocks(const ab_exchange& exchange, const Call& call) {
  for (int step = 1; step < exchange.shape.ranks; ++step) {
    const int to = push_order(exchange, step);
    if (call.lockstep && step > 1) {
      const int source = (exchange.shape.rank - (step - 1) + exchange.shape.ranks) % exchange.shape.ranks;
      AB_RETURN_IF_ERROR(await_arrivals(exchange, {call.buffer, 0, 1, 1u << source}, exchange.arena.side));
    }
    const int64_t offset = exchange.shape.rank * call.bytes;
    AB_RETURN_IF_ERROR(push(exchange, call.buffer, to, offset, call.x + to * call.stride, call.bytes));
    AB_RETURN_IF_ERROR(signal(exchange, call.buffer, 0, to));
  }
  return ok();
}

// The work on the stream of the caller beside the pushes.
ab_status receive(const ab_exchange& exchange, const Call& call, cudaStream_t stream) {
  const int rank = exchange.shape.rank;
  char* const buffer = buffer_of(exchange, rank, call.buffer);
  const char* const own = call.x + rank * call.stride;
  char* const place = buffer + rank * call.bytes;
  if (call.stays_in_buffer && own != place && call.bytes > 0) {
    AB_RETURN_IF_CUDA_ERROR(
        "copy", cudaMemcpyAsync(place, own, static_cast<size_t>(call.bytes), cudaMemcpyDeviceToDevice, stream));
  }
  AB_RETURN_IF_ERROR(await_arrivals(exchange, {call.buffer}, stream));
  if (!call.stays_in_buffer) {
    return launch_collect(exchange.group, {call.buffer, buffer, own, call.out, call.bytes}, stream);
  }
  return launch_fill_if_broken(exchange.group, buffer, exchange.shape.ranks * call.bytes, stream);
}

ab_status run(ab_exchange* exchange, const Call& call, cudaStream_t stream) {
  std::lock_guard lock(exchange->calls);
  AB_RETURN_IF_ERROR(begin_use(*exchange, call.buffer, call.operation, call.bytes, stream));
  if (!exchange->has_peers()) return receive(*exchange, call, stream);
  AB_RETURN_IF_ERROR(fork(*exchange, stream));
  ab_status status = push_blocks(*exchange, call);
  if (status.code == AB_OK) status = receive(*exchange, call, stream);
  // Join after an error, too: what was pushed so far still reads x.
  const ab_status joined = join(*exchange, stream);
  return status.code == AB_OK ? joined : status;
}

template <class Args>
ab_status run(ab_status (*check)(const Args*, const exchange::Shape&, Call*), const Args* args, const ab_exec* exec) {
  AB_RETURN_IF_ERROR(check_exchange(args->exchange));
  Call call;
  AB_RETURN_IF_ERROR(check(args, args->exchange->shape, &call));
  return run(args->exchange, call, stream_of(exec));
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_exchange_all_gather(const ab_exchange_all_gather_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  return cuda::run(exchange::check_all_gather, args, exec);
}

extern "C" ab_status ab_cuda_exchange_all_to_all(const ab_exchange_all_to_all_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  return cuda::run(exchange::check_all_to_all, args, exec);
}

extern "C" ab_status ab_cuda_exchange_release(const ab_exchange_release_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  AB_RETURN_IF_ERROR(cuda::check_exchange(args->exchange));
  AB_RETURN_IF_ERROR(exchange::check_buffer(args->buffer));
  if (args->reserved != 0) return AB_INVALID("reserved: got %d, expected 0", args->reserved);
  std::lock_guard lock(args->exchange->calls);
  return cuda::release_use(*args->exchange, args->buffer, cuda::stream_of(exec));
}
