// Segments of weight-gradient sums. Every row of every group is in one segment, and partial results are numbered in
// order.
#include "experts/cuda/ops/tiles/segments.h"

#include <algorithm>
#include <map>
#include <random>

#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts_case.h"

namespace anabranch::testing {
namespace {

using cuda::Segment;
using cuda::Split;

struct SegmentedRows {
  std::vector<char> memory;
  cuda::SegmentBounds bounds;
  cuda::SegmentList list;

  SegmentedRows(const Tensor<int32_t>& sizes, int64_t R, int64_t D, int64_t N)
      : memory(cuda::weight_gradient_bytes(R, sizes.size(), D, N) + 64),
        bounds(cuda::bound_segments(R, sizes.size(), D, N)),
        list(cuda::place_segments(bounds, memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64, 0)) {
    const auto* sizes_data = static_cast<const int32_t*>(sizes.view()->data);
    EXPECT_OK(cuda::find_segments(cuda::groups_of(sizes_data, sizes.size(), R), bounds, list, nullptr));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
};

// All segments of a group except its last belong to one length class. Classes differ by 1/31 of the bound.
void expect_longest_first(const SegmentedRows& segmented) {
  std::map<int32_t, int> seen;
  int32_t longest = INT32_MAX;
  for (int32_t i = 0; i < segmented.list.counts->segments; ++i) {
    const Segment& segment = segmented.list.segments[i];
    const int32_t length = segment.end - segment.begin;
    EXPECT_LE(length, segmented.bounds.rows);
    if (segment.partial != cuda::kWhole && ++seen[segment.expert] > 1) continue;
    EXPECT_LE(length, longest + segmented.bounds.rows / 31 + 64) << "expert " << segment.expert;
    longest = std::min(longest, length);
  }
}

void check(const std::vector<int32_t>& group_sizes, int64_t R, int64_t D, int64_t N) {
  const auto E = static_cast<int64_t>(group_sizes.size());
  SCOPED_TRACE(::testing::Message() << E << " groups, " << R << " rows, D " << D << " N " << N);
  const Tensor<int32_t> sizes({E}, group_sizes);
  const SegmentedRows segmented(sizes, R, D, N);
  const cuda::SegmentCounts& counts = *segmented.list.counts;
  ASSERT_TRUE(counts.segments >= 0 && counts.segments <= segmented.bounds.segments);
  ASSERT_TRUE(counts.splits >= 0 && counts.splits <= segmented.bounds.partials / 2);
  for (const int32_t next : counts.next_tile) EXPECT_EQ(next, 0);
  expect_longest_first(segmented);
  std::map<int32_t, std::vector<Segment>> segments_by_expert;
  for (int32_t i = 0; i < counts.segments; ++i) {
    segments_by_expert[segmented.list.segments[i].expert].push_back(segmented.list.segments[i]);
  }
  const std::vector<int64_t> ends = ends_of(group_sizes, R);
  int32_t partials = 0;
  int32_t splits = 0;
  int64_t row = 0;
  for (int32_t e = 0; e < E; ++e) {
    std::vector<Segment>& parts = segments_by_expert[e];
    std::sort(parts.begin(), parts.end(), [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
    ASSERT_FALSE(parts.empty()) << "expert " << e;
    for (size_t i = 0; i < parts.size(); ++i) {
      ASSERT_EQ(parts[i].begin, row) << "expert " << e;
      ASSERT_EQ(parts[i].partial, parts.size() == 1 ? cuda::kWhole : partials + static_cast<int32_t>(i));
      row = parts[i].end;
    }
    ASSERT_EQ(row, ends[static_cast<size_t>(e)]) << "expert " << e;
    if (parts.size() == 1) continue;
    ASSERT_LT(splits, counts.splits);
    const Split& split = segmented.list.splits[splits++];
    ASSERT_EQ(split.expert, e);
    ASSERT_EQ(split.first, partials);
    ASSERT_EQ(split.count, static_cast<int32_t>(parts.size()));
    partials += split.count;
  }
  EXPECT_EQ(splits, counts.splits);
  EXPECT_LE(partials, segmented.bounds.partials);
}

TEST(Segments, HoldEveryRowOnce) {
  check({300}, 300, 256, 256);
  check({100000}, 100000, 256, 256);
  check({100000}, 100000, 8192, 8192);  // weights so large that nothing is split
  check({0, 0, 0}, 100, 64, 64);
  check({0, 1, 64, 0, 513, 512, 30000, 65, 0, 1025, 9999}, 50000, 512, 1536);
  check({-5, 2000, INT32_MIN, INT32_MAX, INT32_MAX, 7}, 9000, 64, 64);
  std::mt19937 random(17);
  for (const int E : {31, 32, 33, 129, 1023, 1024, 1025, 3000}) {
    std::vector<int32_t> sizes(static_cast<size_t>(E));
    int64_t R = 100;
    for (int32_t& size : sizes) {
      size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 700);
      if (random() % 20 == 0) size *= 20;
      R += size;
    }
    check(sizes, R, 256, 768);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace anabranch::testing
