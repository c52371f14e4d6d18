// ab_cuda_exchange_all_gather, ab_cuda_exchange_all_to_all, ab_cuda_exchange_sum and ab_cuda_exchange_release.
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "exchange/cuda/returning.h"
#include "exchange/cuda/small_call.h"
#include "exchange/cuda/steps.h"

namespace anabranch::cuda {
namespace {

using exchange::Call;

ab_status push_blocks(const ab_exchange& exchange, const Call& call) {
  for (int step = 1; step < exchange.shape.ranks; ++step) {
    const int to = push_order(exchange, step);
    if (call.lockstep && step > 1) {
      const int source = (exchange.shape.rank - (step - 1) + exchange.shape.ranks) % exchange.shape.ranks;
      AB_RETURN_IF_ERROR(await_arrivals(exchange, {call.buffer, 0, 1u << source}, exchange.arena.side));
    }
    const int64_t offset = exchange.shape.rank * call.bytes;
    AB_RETURN_IF_ERROR(push(exchange, call.buffer, to, offset, call.x + to * call.stride, call.bytes));
    AB_RETURN_IF_ERROR(signal(exchange, call.buffer, 0, to));
  }
  return ok();
}

const char* own_block(const ab_exchange& exchange, const Call& call) {
  return call.x + exchange.shape.rank * call.stride;
}

// Copies this rank's block to its place in the buffer, if the result stays there.
ab_status copy_own(const ab_exchange& exchange, const Call& call) {
  if (!call.stays_in_buffer) return ok();
  return copy_locally(exchange, call.buffer, exchange.shape.rank * call.bytes, own_block(exchange, call), call.bytes);
}

// Waits for the blocks of the peers. Afterwards the result is where the caller wants it.
ab_status receive(const ab_exchange& exchange, const Call& call, cudaStream_t stream) {
  char* const buffer = buffer_of(exchange, exchange.shape.rank, call.buffer);
  Arrivals arrivals{call.buffer};
  if (call.stays_in_buffer) {
    arrivals.memory = buffer;
    arrivals.bytes = exchange.shape.ranks * call.bytes;
    return await_arrivals(exchange, arrivals, stream);
  }
  AB_RETURN_IF_ERROR(await_arrivals(exchange, arrivals, stream));
  return launch_collect(exchange.group, {call.buffer, buffer, own_block(exchange, call), call.out, call.bytes}, stream);
}

ab_status run_small(const ab_exchange& exchange, const Call& call, cudaStream_t stream) {
  SmallCall small{};
  small.operation = call.operation;
  small.buffer = call.buffer;
  for (int r = 0; r < exchange.shape.ranks; ++r) small.places[r] = buffer_of(exchange, r, call.buffer);
  small.tensors[small.count++] = {call.bytes, call.stride, call.x, call.out, 0, 0};
  small.bytes = call.bytes;
  for (int i = 0; i < call.num_more; ++i) {
    const exchange::MoreBlocks& more = call.more[i];
    small.tensors[small.count++] = {more.bytes, 0, more.x, more.out, more.offset, 0};
    small.bytes += more.bytes;
  }
  return launch_small_call(exchange.group, small, stream);
}

// After an error, too, the stream of the caller waits for the copies: what was enqueued so far still reads x.
ab_status start(const ab_exchange& exchange, const Call& call, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(begin_use(exchange, call.buffer, call.operation, call.bytes, stream));
  AB_RETURN_IF_ERROR(fork(exchange, stream));
  ab_status status = push_blocks(exchange, call);
  if (status.code == AB_OK) status = copy_own(exchange, call);
  const ab_status ended = end_copies(exchange, call.buffer);
  if (status.code == AB_OK) return ended;
  if (ended.code == AB_OK) join(exchange, call.buffer, stream);
  return status;
}

ab_status finish(const ab_exchange& exchange, const Call& call, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(await_local_copies(exchange, call.buffer, stream));
  const ab_status status = receive(exchange, call, stream);
  const ab_status joined = await_pushes(exchange, call.buffer, stream);
  return status.code == AB_OK ? joined : status;
}

ab_status run(ab_exchange* exchange, const Call& call, cudaStream_t stream) {
  std::lock_guard lock(exchange->calls);
  switch (call.part) {
    case AB_EXCHANGE_START: return start(*exchange, call, stream);
    case AB_EXCHANGE_FINISH: return finish(*exchange, call, stream);
    default: break;
  }
  if (call.is_small()) return run_small(*exchange, call, stream);
  AB_RETURN_IF_ERROR(start(*exchange, call, stream));
  return finish(*exchange, call, stream);
}

template <class Args>
ab_status run(ab_status (*check)(const Args*, const exchange::Shape&, Call*), const Args* args, const ab_exec* exec) {
  AB_RETURN_IF_ERROR(check_usable(args->exchange));
  Call call;
  AB_RETURN_IF_ERROR(check(args, args->exchange->shape, &call));
  return run(args->exchange, call, stream_of(exec));
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_exchange_all_gather(const ab_exchange_all_gather_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::exchange);
  return cuda::run(exchange::check_all_gather, args, exec);
}

extern "C" ab_status ab_cuda_exchange_all_to_all(const ab_exchange_all_to_all_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::exchange);
  return cuda::run(exchange::check_all_to_all, args, exec);
}

extern "C" ab_status ab_cuda_exchange_sum(const ab_exchange_sum_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::exchange);
  AB_RETURN_IF_ERROR(cuda::check_usable(args->exchange));
  AB_RETURN_IF_ERROR(exchange::check_sum(args, args->exchange->shape));
  cuda::ReturningSums returning;
  AB_RETURN_IF_ERROR(
      cuda::describe_returning({"sums", "exchange", "buffer"}, args->exchange, args->buffer, *args->sums, &returning));
  std::lock_guard lock(args->exchange->calls);
  return cuda::sum_returned(returning, args->factor, args->addend, *args->out, cuda::stream_of(exec));
}

extern "C" ab_status ab_cuda_exchange_release(const ab_exchange_release_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::exchange);
  if (args->reserved != 0) return AB_INVALID("reserved: got %d, expected 0", args->reserved);
  if (args->buffer == AB_EXCHANGE_ALL_BUFFERS) {
    AB_RETURN_IF_ERROR(cuda::check_callable(args->exchange));
    return cuda::abandon(args->exchange, cuda::stream_of(exec));
  }
  AB_RETURN_IF_ERROR(cuda::check_usable(args->exchange));
  AB_RETURN_IF_ERROR(exchange::check_buffer(args->buffer));
  std::lock_guard lock(args->exchange->calls);
  return cuda::release_use(*args->exchange, args->buffer, cuda::stream_of(exec));
}
