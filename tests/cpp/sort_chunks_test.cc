#include <gtest/gtest.h>

#include <algorithm>

#include "dispatch_operands.h"

namespace anabranch::testing {
namespace {

struct Sorted {
  Tensor<float> out;
  Tensor<int32_t> row_id_map;
};

void sort_chunks(const Tensor<float>& x, const std::vector<int32_t>& sizes, const std::vector<int32_t>& order,
                 int32_t inverse, Sorted* sorted, int threads = 0) {
  const int64_t S = static_cast<int64_t>(sizes.size());
  const Tensor<int32_t> split_sizes({S}, sizes);
  const Tensor<int32_t> sorted_indices({S}, order);
  const ab_sort_chunks_args args{sizeof(args),
                                 inverse,
                                 x.view(),
                                 split_sizes.view(),
                                 sorted_indices.view(),
                                 sorted->out.view(),
                                 sorted->row_id_map.view()};
  EXPECT_OK(call(ab_sort_chunks, ab_sort_chunks_workspace, args, threads));
}

TEST(SortChunks, SortsChunksAndInvertsTheSort) {
  const Tensor<float> x({7, 1}, {0, 1, 2, 3, 4, 5, 6});
  Sorted sorted{Tensor<float>({7, 1}), Tensor<int32_t>({7})};
  sort_chunks(x, {2, 0, 3}, {2, 1, 0}, 0, &sorted);
  EXPECT_EQ(sorted.out.values(), (std::vector<float>{2, 3, 4, 0, 1, 5, 6}));
  EXPECT_EQ(sorted.row_id_map.values(), (std::vector<int32_t>{3, 4, 0, 1, 2, 5, 6}));
  Sorted back{Tensor<float>({7, 1}), Tensor<int32_t>({7})};
  sort_chunks(sorted.out, {2, 0, 3}, {2, 1, 0}, 1, &back);
  EXPECT_EQ(back.out.values(), x.values());
  EXPECT_EQ(back.row_id_map.values(), sorted.row_id_map.values());
}

TEST(SortChunks, PermutesForGarbageSizesAndIndices) {
  const int64_t R = 9000;
  const int64_t D = 33;
  const Tensor<float> x({R, D}, normal(R * D, 1));
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<int32_t> sizes = garbage(12, 400, seed);
    for (size_t i = 0; seed % 2 == 0 && i < sizes.size(); ++i) sizes[i] = std::max(sizes[i] % 500, 0);
    const std::vector<int32_t> order = garbage(12, 12, seed + 50);
    Sorted sorted{Tensor<float>({R, D}), Tensor<int32_t>({R})};
    sort_chunks(x, sizes, order, 0, &sorted);
    std::vector<int32_t> rows = sorted.row_id_map.values();
    for (int64_t row = 0; row < R; ++row) {
      const int32_t to = rows[static_cast<size_t>(row)];
      ASSERT_TRUE(to >= 0 && to < R);
      for (int64_t i = 0; i < D; ++i) ASSERT_EQ(sorted.out[to * D + i], x[row * D + i]);
    }
    std::sort(rows.begin(), rows.end());
    for (int64_t row = 0; row < R; ++row) ASSERT_EQ(rows[static_cast<size_t>(row)], row);
    Sorted back{Tensor<float>({R, D}), Tensor<int32_t>({R})};
    sort_chunks(sorted.out, sizes, order, 1, &back, 3);
    EXPECT_EQ(back.out.values(), x.values());
  }
}

TEST(SortChunks, AcceptsRowsWithoutColumns) {
  const Tensor<float> x({4, 0});
  Sorted sorted{Tensor<float>({4, 0}), Tensor<int32_t>({4})};
  sort_chunks(x, {1, 3}, {1, 0}, 0, &sorted);
  EXPECT_EQ(sorted.row_id_map.values(), (std::vector<int32_t>{3, 0, 1, 2}));
}

TEST(SortChunks, RefusesBadArguments) {
  ab_sort_chunks_args args{};
  args.size = sizeof(args);
  args.inverse = 2;
  EXPECT_REFUSED(call(ab_sort_chunks, ab_sort_chunks_workspace, args), AB_INVALID_ARGUMENT, "inverse: got 2");
}

}  // namespace
}  // namespace anabranch::testing
