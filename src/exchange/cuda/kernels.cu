#include "exchange/cuda/kernels.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "exchange/cuda/system_memory.cuh"

namespace anabranch::cuda {
namespace {

using exchange::Group;
using exchange::Operation;
using DeviceProtocol = exchange::Protocol<SystemMemory>;

// Kernels of the protocol have one warp: lane r handles rank r.
static_assert(exchange::kMaxRanks <= kWarp, "a lane handles a rank");

__global__ void __launch_bounds__(kWarp) begin_use(const Group group, int buffer, Operation operation, int64_t bytes) {
  const DeviceProtocol protocol(group);
  const int rank = lane_index();
  if (rank < group.ranks) protocol.await_release(buffer, rank);
  __syncwarp();
  if (rank == 0) protocol.begin(buffer, operation, bytes);
}

__global__ void __launch_bounds__(kWarp) await_arrivals(const Group group, const Arrivals arrivals) {
  const DeviceProtocol protocol(group);
  const int rank = lane_index();
  if (rank >= group.ranks || (arrivals.sources >> rank & 1u) == 0) return;
  const int end = arrivals.first_phase + arrivals.phases;
  for (int phase = arrivals.first_phase; phase < end; ++phase) protocol.await_arrival(arrivals.buffer, phase, rank);
}

__global__ void __launch_bounds__(kWarp) release_buffer(const Group group, int buffer) {
  const int rank = lane_index();
  if (rank < group.ranks) DeviceProtocol(group).release(buffer, rank);
}

// Large copies: a block copies a chunk of one source.
constexpr int kCopyThreads = 256;
constexpr int64_t kChunkBytes = 32 << 10;

template <class Bytes>
__device__ void copy(const Bytes* from, Bytes* to, int64_t count) {
  constexpr int kLoads = 8;  // in flight per thread
  for (int64_t first = threadIdx.x; first < count; first += kCopyThreads * kLoads) {
    Bytes words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < count) words[i] = __ldcs(from + first + i * kCopyThreads);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < count) to[first + i * kCopyThreads] = words[i];
    }
  }
}

template <class Bytes>
__device__ void fill_with_ones(Bytes* to, int64_t count) {
  auto* bytes = reinterpret_cast<unsigned char*>(to);
  const int64_t end = count * static_cast<int64_t>(sizeof(Bytes));
  for (int64_t i = threadIdx.x; i < end; i += kCopyThreads) bytes[i] = 0xff;
}

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
  __syncthreads();  // all threads have read
  const bool is_valid = __syncthreads_and(threadIdx.x != 0 || protocol.read_valid_data());
  if (!is_valid) fill_with_ones(to, count);

  // The last block of the grid releases the buffer, after the reads of all blocks.
  uint32_t* const finished = &group.flags[group.rank]->finished_blocks[blocks.buffer];
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (is_last) *finished = 0;
    __threadfence();
  }
  if (__syncthreads_or(is_last) && static_cast<int>(threadIdx.x) < group.ranks) {
    protocol.release(blocks.buffer, static_cast<int>(threadIdx.x));
  }
}

__global__ void __launch_bounds__(kCopyThreads) fill_if_broken(const Group group, char* data, int64_t bytes) {
  const bool is_valid = __syncthreads_and(threadIdx.x != 0 || DeviceProtocol(group).read_valid_data());
  if (is_valid) return;
  const int64_t begin = blockIdx.x * kChunkBytes;
  fill_with_ones(data + begin, min(kChunkBytes, bytes - begin));
}

int64_t chunks_of(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

template <class Kernel>
ab_status load(Kernel kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t failure = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  return failure == cudaSuccess ? ok() : failed("exchange: loading a kernel", failure);
}

}  // namespace

ab_status load_kernels() {
  AB_RETURN_IF_ERROR(load(begin_use));
  AB_RETURN_IF_ERROR(load(await_arrivals));
  AB_RETURN_IF_ERROR(load(release_buffer));
  AB_RETURN_IF_ERROR(load(fill_if_broken));
  for (int bytes = 1; bytes <= kAccessBytes; bytes *= 2) {
    AB_RETURN_IF_ERROR(with_word(bytes, []<class Bytes>(Bytes) { return load(collect<Bytes>); }));
  }
  return ok();
}

ab_status launch_begin(const Group& group, int buffer, Operation operation, int64_t bytes, cudaStream_t stream) {
  return launch("exchange begin", begin_use, {1, kWarp, 0, stream}, group, buffer, operation, bytes);
}

ab_status launch_await(const Group& group, const Arrivals& arrivals, cudaStream_t stream) {
  return launch("exchange await", await_arrivals, {1, kWarp, 0, stream}, group, arrivals);
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

ab_status launch_fill_if_broken(const Group& group, char* data, int64_t bytes, cudaStream_t stream) {
  return launch("exchange fill", fill_if_broken, {chunks_of(bytes), kCopyThreads, 0, stream}, group, data, bytes);
}

ab_status launch_release(const Group& group, int buffer, cudaStream_t stream) {
  return launch("exchange release", release_buffer, {1, kWarp, 0, stream}, group, buffer);
}

}  // namespace anabranch::cuda
