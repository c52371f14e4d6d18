#include "exchange/cuda/kernels.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "exchange/cuda/block.cuh"
#include "exchange/cuda/load.h"
#include "exchange/cuda/small_call.h"
#include "exchange/cuda/sum.h"

namespace anabranch::cuda {
namespace {

using exchange::Group;
using exchange::Operation;

// In the kernels of the protocol, thread r of the first warp handles rank r.
static_assert(exchange::kMaxRanks <= kWarp, "a lane handles a rank");

__global__ void __launch_bounds__(kWarp) begin_use(const Group group, int buffer, Operation operation, int64_t bytes) {
  const DeviceProtocol protocol(group);
  const int rank = lane_index();
  if (rank < group.ranks) protocol.await_release(buffer, rank);
  __syncwarp();
  if (rank == 0) protocol.begin(buffer, protocol.next_use(buffer, operation, bytes));
}

__global__ void __launch_bounds__(kCopyThreads) await_arrivals(const Group group, const Arrivals arrivals) {
  const DeviceProtocol protocol(group);
  const auto rank = static_cast<int>(threadIdx.x);
  if (rank < group.ranks && rank != group.rank && (arrivals.sources >> rank & 1u) != 0) {
    const bool arrived = protocol.await_arrival(arrivals.buffer, arrivals.phase, rank);
    if (arrived && arrivals.phase > 0) protocol.forget_arrival(arrivals.buffer, arrivals.phase, rank);
  }
  if (!has_read_valid_data(protocol)) fill_with_ones(arrivals.memory, arrivals.bytes);
}

// The stores of earlier kernels come before this kernel, and its stores have release semantics, so a peer that sees the
// flag sees what they stored.
__global__ void __launch_bounds__(kWarp) signal_peers(const Group group, int buffer, int phase) {
  const DeviceProtocol protocol(group);
  const int rank = lane_index();
  if (rank < group.ranks && rank != group.rank) protocol.signal(buffer, phase, rank);
}

__global__ void __launch_bounds__(kWarp) release_buffer(const Group group, int buffer) {
  const int rank = lane_index();
  if (rank < group.ranks) DeviceProtocol(group).release(buffer, rank);
}

__global__ void __launch_bounds__(kWarp) abandon_use(const Group group, int buffer) {
  const DeviceProtocol protocol(group);
  const int rank = lane_index();
  const bool abandons = rank < group.ranks && protocol.holds(buffer);
  __syncwarp();
  if (abandons) protocol.await_arrival(buffer, 0, rank);
  __syncwarp();
  if (abandons) protocol.release(buffer, rank);
}

// A block of the following kernel copies a chunk of one source.
constexpr int64_t kChunkBytes = 32 << 10;

template <class Bytes>
__global__ void __launch_bounds__(kCopyThreads)
    collect(const Group group, const Collection blocks, const int64_t chunks) {
  const DeviceProtocol protocol(group);
  const auto source = static_cast<int>(blockIdx.x / chunks);
  const int64_t begin = (blockIdx.x - source * chunks) * kChunkBytes;
  const int64_t count = min(kChunkBytes, blocks.bytes - begin) / static_cast<int64_t>(sizeof(Bytes));
  const char* const from = source == group.rank ? blocks.own : blocks.arrived + source * blocks.bytes;
  auto* const to = reinterpret_cast<Bytes*>(blocks.out + source * blocks.bytes + begin);
  copy(reinterpret_cast<const Bytes*>(from + begin), to, count);
  if (!has_read_valid_data(protocol)) fill_with_ones(to, count);

  // The last block of the grid releases the buffer, after the reads of all blocks.
  if (is_last_block(&group.flags[group.rank]->finished_blocks[blocks.buffer]) &&
      static_cast<int>(threadIdx.x) < group.ranks) {
    protocol.release(blocks.buffer, static_cast<int>(threadIdx.x));
  }
}

int64_t chunks_of(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

}  // namespace

ab_status load_kernels() {
  AB_RETURN_IF_ERROR(load(begin_use));
  AB_RETURN_IF_ERROR(load(await_arrivals));
  AB_RETURN_IF_ERROR(load(signal_peers));
  AB_RETURN_IF_ERROR(load(release_buffer));
  AB_RETURN_IF_ERROR(load(abandon_use));
  for (int bytes = 1; bytes <= kAccessBytes; bytes *= 2) {
    AB_RETURN_IF_ERROR(with_word(bytes, []<class Bytes>(Bytes) { return load(collect<Bytes>); }));
  }
  AB_RETURN_IF_ERROR(load_sum());
  return load_small_call();
}

ab_status launch_begin(const Group& group, int buffer, Operation operation, int64_t bytes, cudaStream_t stream) {
  return launch("exchange begin", begin_use, {1, kWarp, 0, stream}, group, buffer, operation, bytes);
}

ab_status launch_await(const Group& group, const Arrivals& arrivals, cudaStream_t stream) {
  return launch("exchange await", await_arrivals, {1, kCopyThreads, 0, stream}, group, arrivals);
}

ab_status launch_collect(const Group& group, const Collection& collection, cudaStream_t stream) {
  const int64_t chunks = std::max<int64_t>(chunks_of(collection.bytes), 1);  // an empty call releases the buffer, too
  const int bytes = common_alignment({address(collection.arrived), address(collection.own), address(collection.out),
                                      static_cast<uintptr_t>(collection.bytes)});
  return with_word(bytes, [&]<class Bytes>(Bytes) {
    return launch("exchange collect", collect<Bytes>, {chunks * group.ranks, kCopyThreads, 0, stream}, group,
                  collection, chunks);
  });
}

ab_status launch_signal(const Group& group, int buffer, int phase, cudaStream_t stream) {
  return launch("exchange signal", signal_peers, {1, kWarp, 0, stream}, group, buffer, phase);
}

ab_status launch_release(const Group& group, int buffer, cudaStream_t stream) {
  return launch("exchange release", release_buffer, {1, kWarp, 0, stream}, group, buffer);
}

ab_status launch_abandon(const Group& group, int buffer, cudaStream_t stream) {
  return launch("exchange abandon", abandon_use, {1, kWarp, 0, stream}, group, buffer);
}

}  // namespace anabranch::cuda
