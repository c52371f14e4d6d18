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

// A block of the grid moves one slice of the block of every rank, of every tensor.
constexpr int kMaxSlices = exchange::kPhases;
constexpr int64_t kMinSliceBytes = 8 << 10;
static_assert(exchange::kMaxRanks <= kWarp, "the first warp has a thread per rank");
static_assert(kCopyThreads > kWarp, "the second warp numbers the block");

// The number of slices, for a call with this many bytes per rank.
int64_t slices_of(int64_t bytes) {
  return std::clamp<int64_t>((bytes + kMinSliceBytes - 1) / kMinSliceBytes, 1, kMaxSlices);
}

// The bytes of each slice but the last.
int64_t slice_bytes(int64_t bytes, int64_t slices) {
  const int64_t unit = slices * kAccessBytes;
  return (bytes + unit - 1) / unit * kAccessBytes;
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
    run_small_call(const Group group, const __grid_constant__ SmallCall call) {
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
  const auto copy_slice = [&](const SmallBlocks& blocks, const char* from, char* to) {
    const int64_t begin = slice * blocks.slice_bytes;
    const int64_t count = max(min(blocks.slice_bytes, blocks.bytes - begin), int64_t{0});
    copy(reinterpret_cast<const Bytes*>(from + begin), reinterpret_cast<Bytes*>(to + begin),
         count / static_cast<int64_t>(sizeof(Bytes)));
  };

  // Without permission nothing is pushed: the exchange is broken on all ranks, so no peer waits for the slice.
  if (__syncthreads_and(may_push)) {
    for (int step = 1; step < group.ranks; ++step) {
      const int to = (group.rank + step) % group.ranks;
      for (int i = 0; i < call.count; ++i) {
        const SmallBlocks& blocks = call.tensors[i];
        copy_slice(blocks, blocks.x + to * blocks.stride, call.places[to] + blocks.offset + group.rank * blocks.bytes);
      }
    }
    __syncthreads();  // all threads have pushed
    if (handles_rank && rank != group.rank) protocol.signal(call.buffer, slice, rank, use);
  }
  for (int i = 0; i < call.count; ++i) {
    const SmallBlocks& blocks = call.tensors[i];
    copy_slice(blocks, blocks.x + group.rank * blocks.stride, blocks.out + group.rank * blocks.bytes);
  }
  if (handles_rank && protocol.await_arrival(call.buffer, slice, rank, use)) {
    protocol.forget_arrival(call.buffer, slice, rank);
  }
  __syncthreads();  // the slices of all peers have arrived
  for (int step = 1; step < group.ranks; ++step) {
    const int source = (group.rank + step) % group.ranks;
    for (int i = 0; i < call.count; ++i) {
      const SmallBlocks& blocks = call.tensors[i];
      copy_slice(blocks, call.places[group.rank] + blocks.offset + source * blocks.bytes,
                 blocks.out + source * blocks.bytes);
    }
  }

  if (!is_last_block(&flags.finished_blocks[call.buffer])) return;
  if (!has_read_valid_data(protocol)) {
    for (int i = 0; i < call.count; ++i) fill_with_ones(call.tensors[i].out, group.ranks * call.tensors[i].bytes);
  }
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

ab_status launch_small_call(const Group& group, SmallCall call, cudaStream_t stream) {
  const int64_t slices = slices_of(call.bytes);
  int alignment = kAccessBytes;
  for (int i = 0; i < call.count; ++i) {
    SmallBlocks& blocks = call.tensors[i];
    blocks.slice_bytes = slice_bytes(blocks.bytes, slices);
    alignment = std::min(
        alignment, common_alignment({address(blocks.x), address(blocks.out), static_cast<uintptr_t>(blocks.bytes)}));
  }
  return with_word(alignment, [&]<class Bytes>(Bytes) {
    return launch("exchange small call", run_small_call<Bytes>, {slices, kCopyThreads, 0, stream}, group, call);
  });
}

}  // namespace anabranch::cuda
