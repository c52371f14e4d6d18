#include "experts/cuda/ops/tiles/segments.h"

#include <algorithm>

#include "core/cuda/block_sum.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {
namespace {

static_assert(kBlockK == 64, "segments must be whole k-blocks");

constexpr int kMaxThreads = 1024;
constexpr int kLengths = kWarp;  // length classes of segments, longest first

template <class T>
__host__ __device__ constexpr T round_up(T value, T step) {
  return (value + step - 1) / step * step;
}

// Splits a group of `rows` rows into `count` segments of `length` rows; the last one may be shorter.
struct Cut {
  int32_t count;
  int32_t length;

  __device__ Cut(int32_t rows, int32_t max_length) {
    const int32_t min_count = max((rows + max_length - 1) / max_length, 1);
    length = round_up((rows + min_count - 1) / min_count, kBlockK);
    count = length == 0 ? 1 : (rows + length - 1) / length;
  }
  __device__ int length_class(int32_t max_length) const {
    return kLengths - 1 - static_cast<int>(static_cast<int64_t>(length) * (kLengths - 1) / max_length);
  }
};

// Calls visit(expert, begin, end, cut, index of the first partial sum, index of the split) for every group, with one
// thread per group. Returns the number of partial sums (low half) and splits (high half).
template <class Visit>
__device__ int64_t for_each_group(const Groups& groups, int32_t max_length, const Visit& visit) {
  int64_t rows_before = 0;
  int64_t parts_before = 0;
  for (int64_t first = 0; first < groups.E; first += blockDim.x) {
    const int64_t expert = first + threadIdx.x;
    const bool is_group = expert < groups.E;
    const int64_t size = is_group ? max(groups.sizes[expert], 0) : 0;
    int64_t total;
    const int64_t before = rows_before + sum_before(size, &total);
    rows_before += total;
    const auto begin = static_cast<int32_t>(min(before, static_cast<int64_t>(groups.R)));
    const auto end = static_cast<int32_t>(min(before + size, static_cast<int64_t>(groups.R)));
    const Cut cut(end - begin, max_length);
    const int64_t own_parts = is_group && cut.count > 1 ? int64_t{1} << 32 | cut.count : 0;
    const int64_t parts = parts_before + sum_before(own_parts, &total);
    parts_before += total;
    if (is_group) {
      visit(static_cast<int32_t>(expert), begin, end, cut, static_cast<int32_t>(parts),
            static_cast<int32_t>(parts >> 32));
    }
  }
  return parts_before;
}

// Runs in one CTA. Counts the segments of each length class, then assigns every group its positions in the list.
__global__ void __launch_bounds__(kMaxThreads) list_segments(Groups groups, int32_t max_length, SegmentList list) {
  __shared__ int32_t places[kLengths];  // number of segments per class, then the next free position
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp_index() == 0) places[lane_index()] = 0;
  __syncthreads();
  const int64_t parts =
      for_each_group(groups, max_length, [&](int32_t, int32_t, int32_t, const Cut& cut, int32_t, int32_t) {
        atomicAdd(places + cut.length_class(max_length), cut.count);
      });
  __syncthreads();
  if (warp_index() == 0) {
    const int32_t own = places[lane_index()];
    int32_t end = own;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_index() >= distance) end += before;
    }
    places[lane_index()] = end - own;
    if (lane_index() == kWarp - 1) *list.counts = {end, static_cast<int32_t>(parts >> 32), {}};
  }
  __syncthreads();
  for_each_group(groups, max_length,
                 [&](int32_t expert, int32_t begin, int32_t end, const Cut& cut, int32_t partial, int32_t split) {
                   const int32_t place = atomicAdd(places + cut.length_class(max_length), cut.count);
                   for (int32_t i = 0; i < cut.count; ++i) {
                     const int32_t row = begin + i * cut.length;
                     list.segments[place + i] = {expert, row, min(row + cut.length, end),
                                                 cut.count == 1 ? kWhole : partial + i};
                   }
                   if (cut.count > 1) list.splits[split] = {expert, partial, cut.count};
                 });
}

constexpr int kAddThreads = 256;
constexpr int kAddBlocks = 4;  // per SM

// kVector: 8 elements per thread in whole 16-byte words, or 1.
template <class Out, int kVector>
__global__ void __launch_bounds__(kAddThreads)
    sum_partials(SegmentList list, int64_t elements, Out* out, bool accumulates) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t vectors = elements / kVector;
  const int64_t all = list.counts->splits * vectors;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * kAddThreads) {
    const Split split = list.splits[i / vectors];
    const int64_t place = i % vectors * kVector;
    float sums[kVector] = {};
    const float* partial = list.partials + split.first * elements + place;
    for (int32_t n = 0; n < split.count; ++n, partial += elements) {
      if constexpr (kVector == 1) {
        sums[0] += *partial;
      } else {
#pragma unroll
        for (int j = 0; j < kVector; j += 4) {
          const float4 values = *reinterpret_cast<const float4*>(partial + j);
          sums[j] += values.x;
          sums[j + 1] += values.y;
          sums[j + 2] += values.z;
          sums[j + 3] += values.w;
        }
      }
    }
    Out* result = out + split.expert * elements + place;
    alignas(kVector * sizeof(Out)) Out values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      values[j] = from_float<Out>(accumulates ? to_float(result[j]) + sums[j] : sums[j]);
    }
    if constexpr (kVector == 1) {
      *result = values[0];
    } else {
#pragma unroll
      for (size_t j = 0; j < sizeof(values) / sizeof(uint4); ++j) {
        reinterpret_cast<uint4*>(result)[j] = reinterpret_cast<const uint4*>(values)[j];
      }
    }
  }
}

}  // namespace

SegmentList place_segments(const SegmentBounds& bounds, void* workspace, int use) {
  const SegmentLayout layout(bounds);
  char* memory = static_cast<char*>(workspace);
  auto* const counts = reinterpret_cast<SegmentCounts*>(memory);
  return {counts, counts->next_tile + use, reinterpret_cast<Segment*>(memory + layout.segments),
          reinterpret_cast<Split*>(memory + layout.splits), reinterpret_cast<float*>(memory + layout.partials)};
}

ab_status find_segments(const Groups& groups, const SegmentBounds& bounds, const SegmentList& list,
                        cudaStream_t stream) {
  const int threads = std::min(round_up(std::max(groups.E, 1), kWarp), kMaxThreads);
  return launch("segments", list_segments, {1, threads, 0, stream, true}, groups, static_cast<int32_t>(bounds.rows),
                list);
}

ab_status add_segment_sums(const SegmentList& list, int64_t elements, void* out, int32_t dtype, bool accumulates,
                           int multiprocessors, cudaStream_t stream) {
  const Launch shape{int64_t{kAddBlocks} * multiprocessors, kAddThreads, 0, stream, true};
  constexpr int kVector = 8;
  const bool in_vectors = address(out) % kAccessBytes == 0 && elements % kVector == 0;
  return with_float_type(dtype, [&]<class Out>(Out) {
    return launch("partial sums", in_vectors ? sum_partials<Out, kVector> : sum_partials<Out, 1>, shape, list, elements,
                  static_cast<Out*>(out), accumulates);
  });
}

}  // namespace anabranch::cuda
