#include "exchange/cuda/small_call.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "exchange/cuda/block.cuh"
#include "exchange/cuda/load.h"

namespace anabranch::cuda {
namespace {

using exchange::Flags;
using exchange::Group;
using exchange::Word;

// A block of the grid moves one slice of the block of every rank.
constexpr int kMaxSlices = exchange::kPhases;
constexpr int64_t kMinSliceBytes = 8 << 10;
static_assert(exchange::kMaxRanks <= kWarp, "the first warp has a thread per rank");
static_assert(kCopyThreads > kWarp, "the second warp numbers the block");

struct Slices {
  int count;      // the number of blocks of the grid
  int64_t bytes;  // of each but the last
};

Slices slices_of(int64_t bytes) {
  const int64_t count = std::clamp<int64_t>((bytes + kMinSliceBytes - 1) / kMinSliceBytes, 1, kMaxSlices);
  const int64_t unit = count * kAccessBytes;
  return {static_cast<int>(count), (bytes + unit - 1) / unit * kAccessBytes};
}

// The number of this block: how many blocks of the grid started before. Returned to all threads.
__device__ __forceinline__ int start_block(uint32_t* started_blocks) {
  __shared__ uint32_t number;
  if (threadIdx.x == kWarp) number = atomicAdd(started_blocks, 1u);
  __syncthreads();
  return static_cast<int>(number);
}

// protocol.h states why the blocks of the grid cannot deadlock. Thread r handles the flags of rank r.
//
// Memory order: a barrier follows the stores of all threads. Then the threads of ranks store the flags with release
// semantics at system scope, which covers all stores before the barrier (cumulativity). The threads that load the flags
// have acquire semantics, and a barrier follows before the other threads of their block read the data.
template <class Bytes>
__global__ void __launch_bounds__(kCopyThreads)
    run_small_call(const Group group, const SmallCall call, const int64_t slice_bytes) {
  const DeviceProtocol protocol(group);
  Flags& flags = *group.flags[group.rank];
  const auto rank = static_cast<int>(threadIdx.x);
  const bool handles_rank = rank < group.ranks;
  Word use = 0;
  bool may_push = true;
  if (handles_rank) {
    use = protocol.next_use(call.buffer, call.operation, call.bytes);
    may_push = protocol.await_release(call.buffer, rank);
  }
  const int slice = start_block(&flags.started_blocks[call.buffer]);
  const int64_t begin = slice * slice_bytes;
  const int64_t count = max(min(slice_bytes, call.bytes - begin), int64_t{0}) / static_cast<int64_t>(sizeof(Bytes));
  const auto copy_slice = [&](const char* from, char* to) {
    copy(reinterpret_cast<const Bytes*>(from + begin), reinterpret_cast<Bytes*>(to + begin), count);
  };

  // Without permission nothing is pushed: the exchange is broken on all ranks, so no peer waits for the slice.
  if (__syncthreads_and(may_push)) {
    for (int step = 1; step < group.ranks; ++step) {
      const int to = (group.rank + step) % group.ranks;
      copy_slice(call.x + to * call.stride, call.places[to] + group.rank * call.bytes);
    }
    __syncthreads();  // all threads have pushed
    if (handles_rank && rank != group.rank) protocol.signal(call.buffer, slice, rank, use);
  }
  copy_slice(call.x + group.rank * call.stride, call.out + group.rank * call.bytes);
  if (handles_rank && protocol.await_arrival(call.buffer, slice, rank, use)) {
    protocol.forget_arrival(call.buffer, slice, rank);
  }
  __syncthreads();  // the slices of all peers have arrived
  for (int step = 1; step < group.ranks; ++step) {
    const int source = (group.rank + step) % group.ranks;
    copy_slice(call.places[group.rank] + source * call.bytes, call.out + source * call.bytes);
  }

  if (!is_last_block(&flags.finished_blocks[call.buffer])) return;
  if (!has_read_valid_data(protocol)) fill_with_ones(call.out, group.ranks * call.bytes);
  if (handles_rank) protocol.release(call.buffer, rank, use);
  if (rank == 0) {
    flags.started_blocks[call.buffer] = 0;
    protocol.begin(call.buffer, use);  // for the next call
  }
}

}  // namespace

ab_status load_small_call() {
  for (int bytes = 1; bytes <= kAccessBytes; bytes *= 2) {
    AB_RETURN_IF_ERROR(with_word(bytes, []<class Bytes>(Bytes) { return load(run_small_call<Bytes>); }));
  }
  return ok();
}

ab_status launch_small_call(const Group& group, const SmallCall& call, cudaStream_t stream) {
  const Slices slices = slices_of(call.bytes);
  const int bytes = common_alignment({address(call.x), address(call.out), static_cast<uintptr_t>(call.bytes)});
  return with_word(bytes, [&]<class Bytes>(Bytes) {
    return launch("exchange small call", run_small_call<Bytes>, {slices.count, kCopyThreads, 0, stream}, group, call,
                  slices.bytes);
  });
}

}  // namespace anabranch::cuda
