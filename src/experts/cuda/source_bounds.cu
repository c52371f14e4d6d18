#include "experts/cuda/source_bounds.h"

#include <algorithm>

#include "core/cuda/block_sum.cuh"
#include "core/cuda/launch.h"

namespace anabranch::cuda {
namespace {

constexpr int kMaxThreads = 1024;

struct Search {
  Groups groups;
  RowMap map;
  int32_t first_slot;
  int32_t end_slot;
  bool rounds_up;
};

struct FoundRows {
  int32_t first;
  int32_t end;
};

// Finds, in [begin, end), the first rows whose slots are at least two given ones, or end. Padding is at the end of a
// group. Both searches wait for memory at the same time.
__device__ FoundRows find_rows(const RowMap& map, int32_t begin, int32_t end, int32_t first_slot, int32_t end_slot) {
  int32_t begins[] = {begin, begin};
  int32_t ends[] = {end, end};
  const int32_t slots[] = {first_slot, end_slot};
  while (begins[0] < ends[0] || begins[1] < ends[1]) {
    int32_t middles[2];
    int32_t found[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      middles[i] = begins[i] + (ends[i] - begins[i]) / 2;
      found[i] = begins[i] < ends[i] ? map.slot_of(middles[i]) : -1;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (begins[i] >= ends[i]) continue;
      if (found[i] >= 0 && found[i] < slots[i]) {
        begins[i] = middles[i] + 1;
      } else {
        ends[i] = middles[i];
      }
    }
  }
  return {begins[0], begins[1]};
}

// Rounds a number of rows of a group of `size` rows to whole tiles, or to its end.
__device__ int32_t round(int32_t rows, int32_t size, bool up) {
  return rows == size ? size : min((rows + (up ? kPartTileRows - 1 : 0)) / kPartTileRows * kPartTileRows, size);
}

// One CTA, a thread per group.
__global__ void __launch_bounds__(kMaxThreads) find_bounds(const Search search, int32_t* const bounds) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Groups& groups = search.groups;
  int64_t rows_before = 0;
  for (int64_t first = 0; first < groups.E; first += blockDim.x) {
    const int64_t group = first + threadIdx.x;
    const int64_t size = group < groups.E ? max(groups.sizes[group], 0) : 0;
    int64_t total;
    const int64_t before = rows_before + sum_before(size, &total);
    rows_before += total;
    if (group >= groups.E) continue;
    const auto begin = static_cast<int32_t>(min(before, static_cast<int64_t>(groups.R)));
    const auto end = static_cast<int32_t>(min(before + size, static_cast<int64_t>(groups.R)));
    const FoundRows rows = find_rows(search.map, begin, end, search.first_slot, search.end_slot);
    const int32_t from = round(rows.first - begin, end - begin, !search.rounds_up);
    const int32_t to = round(rows.end - begin, end - begin, search.rounds_up);
    bounds[2 * group] = begin + from;
    bounds[2 * group + 1] = begin + max(from, to);
  }
}

}  // namespace

ab_status find_source_bounds(const Groups& groups, const RowMap& map, const Sources& sources, int32_t* bounds,
                             cudaStream_t stream) {
  const auto slot_of = [&](int64_t source) { return static_cast<int32_t>(source * sources.slots_per_source); };
  const int threads = std::min((std::max(groups.E, 1) + kWarp - 1) / kWarp * kWarp, kMaxThreads);
  return launch("source bounds", find_bounds, {1, threads, 0, stream, true},
                Search{groups, map, slot_of(sources.first), slot_of(sources.end), sources.rounds_up}, bounds);
}

}  // namespace anabranch::cuda
