// ab_cuda_sort_chunks: one block computes where chunks begin on both sides; then warps move parts of rows.
#include "anabranch/cuda.h"
#include "core/cuda/block_sum.cuh"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "dispatch/check.h"
#include "dispatch/columns.cuh"
#include "dispatch/workspace_sizes.h"

namespace anabranch::cuda {
namespace {

constexpr int kPlaceThreads = 1024;  // of the block that computes the starts

// The first row of each chunk on the unsorted and on the sorted side, in the workspace. Chunk S is the tail, which
// keeps its position.
struct Starts {
  int32_t* unsorted;  // [S+1]
  int32_t* sorted;    // [S+1]
  int32_t* named_at;  // [S] the first index into sorted_indices that names the chunk; S: none

  Starts(const ChunkSort& sort, void* workspace)
      : unsorted(static_cast<int32_t*>(workspace)), sorted(unsorted + sort.S + 1), named_at(sorted + sort.S + 1) {}

  __device__ int32_t size(int64_t chunk) const { return unsorted[chunk + 1] - unsorted[chunk]; }
};

// Exclusive scan of chunk sizes, one chunk per thread, that continues across calls: *end is the end of the previous
// call's chunks, and is advanced past those of this call.
__device__ int64_t place_next(int64_t size, int64_t* end) {
  int64_t total;
  const int64_t begin = *end + sum_before(size, &total);
  *end += total;
  return begin;
}

__global__ void __launch_bounds__(kPlaceThreads) place_chunks(const ChunkSort sort, const Starts starts) {
  let_next_kernel_start();
  const int64_t S = sort.S;
  const int32_t none = static_cast<int32_t>(S);
  for (int64_t chunk = threadIdx.x; chunk < S; chunk += kPlaceThreads) starts.named_at[chunk] = none;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < S; i += kPlaceThreads) {
    if (Maps::is_index(sort.order[i], S)) atomicMin(starts.named_at + sort.order[i], static_cast<int32_t>(i));
  }
  int64_t rows = 0;
  for (int64_t begin = 0; begin < S; begin += kPlaceThreads) {
    const int64_t chunk = begin + threadIdx.x;
    const int64_t start = place_next(chunk < S ? std::max(sort.sizes[chunk], 0) : 0, &rows);
    if (chunk < S) starts.unsorted[chunk] = static_cast<int32_t>(std::min(start, sort.R));
  }
  if (threadIdx.x == 0) starts.unsorted[S] = starts.sorted[S] = static_cast<int32_t>(std::min(rows, sort.R));
  __syncthreads();
  rows = 0;
  for (int64_t begin = 0; begin < S; begin += kPlaceThreads) {
    const int64_t i = begin + threadIdx.x;
    const int32_t chunk = i < S ? sort.order[i] : -1;
    const bool is_first = Maps::is_index(chunk, S) && starts.named_at[chunk] == i;
    const int64_t start = place_next(is_first ? starts.size(chunk) : 0, &rows);
    if (is_first) starts.sorted[chunk] = static_cast<int32_t>(start);
  }
  for (int64_t begin = 0; begin < S; begin += kPlaceThreads) {
    const int64_t chunk = begin + threadIdx.x;
    const bool follows = chunk < S && starts.named_at[chunk] == none;
    const int64_t start = place_next(follows ? starts.size(chunk) : 0, &rows);
    if (follows) starts.sorted[chunk] = static_cast<int32_t>(start);
  }
}

// The index of the last of `count` ascending values that is at most `value`, found by a warp. The first value must be
// at most `value`.
__device__ __forceinline__ int64_t last_at_most(const int32_t* values, int64_t count, int64_t value) {
  int64_t low = 0;
  while (count > 1) {
    const int64_t step = (count + kWarp - 1) / kWarp;
    const int64_t probe = lane_index() * step;
    const unsigned lanes = __ballot_sync(kAllLanes, probe < count && values[low + probe] <= value);
    const int64_t passed = (__popc(lanes) - 1) * step;
    low += passed;
    count = std::min(step, count - passed);
  }
  return low;
}

// Moves rows of `width` words. Bytes: a Word.
template <class Bytes>
__global__ void __launch_bounds__(PartsBlock::kThreads)
    move_rows(const ChunkSort sort, const Starts starts, const int64_t width, const int64_t parts) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * PartsBlock::kWarps + warp_index();
  const int64_t row = item / parts;
  if (row >= sort.R) return;
  const Columns<1> columns(item - row * parts, width);
  wait_for_previous_kernel();
  const int64_t chunk = last_at_most(starts.unsorted, sort.S + 1, row);
  const int64_t place = starts.sorted[chunk] + row - starts.unsorted[chunk];
  const int64_t from = sort.inverse ? place : row;
  const int64_t to = sort.inverse ? row : place;
  Vectors<Bytes, 1> part;
  part.load(reinterpret_cast<const Bytes*>(sort.x.data) + from * width + columns.first, columns.count);
  part.store(reinterpret_cast<Bytes*>(sort.out.data) + to * width + columns.first, columns.count);
  if (sort.row_id_map != nullptr && columns.first == 0) sort.row_id_map[row] = static_cast<int32_t>(place);
}

ab_status check(const ab_sort_chunks_args* args, ChunkSort* sort) {
  AB_RETURN_IF_ERROR(check_sort_chunks(args, sort));
  constexpr int64_t kMaxChunks = (int64_t{1} << 31) - 1;
  if (sort->S <= kMaxChunks) return ok();
  return error(AB_UNSUPPORTED, "split_sizes: got %lld chunks, expected fewer than 2^31 on CUDA",
               static_cast<long long>(sort->S));
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  ChunkSort sort;
  AB_RETURN_IF_ERROR(cuda::check(args, &sort));
  return report_workspace(cuda::sort_chunks_bytes(sort.S), bytes);
}

ab_status ab_cuda_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  ChunkSort sort;
  AB_RETURN_IF_ERROR(cuda::check(args, &sort));
  AB_RETURN_IF_ERROR(check_workspace(exec, cuda::sort_chunks_bytes(sort.S)));
  if (sort.R == 0) return ok();
  const cuda::Starts starts(sort, exec->workspace);
  const cudaStream_t stream = cuda::stream_of(exec);
  AB_RETURN_IF_ERROR(
      cuda::launch("sort_chunks: place_chunks", cuda::place_chunks, {1, cuda::kPlaceThreads, 0, stream}, sort, starts));
  const int alignment = cuda::common_alignment(
      {cuda::address(sort.x.data), cuda::address(sort.out.data), static_cast<uintptr_t>(sort.x.bytes)});
  return cuda::with_word(alignment, [&]<class Bytes>(Bytes) {
    const int64_t width = sort.x.bytes / static_cast<int64_t>(sizeof(Bytes));
    const int64_t parts = cuda::Columns<1>::parts(width);
    const int64_t blocks = (sort.R * parts + cuda::PartsBlock::kWarps - 1) / cuda::PartsBlock::kWarps;
    return cuda::launch("sort_chunks: move_rows", cuda::move_rows<Bytes>,
                        {blocks, cuda::PartsBlock::kThreads, 0, stream, true}, sort, starts, width, parts);
  });
}

}  // extern "C"
