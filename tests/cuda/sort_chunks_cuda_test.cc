// Chunk sort and the expansion of a row_id_map on the GPU against the CPU. All bytes must be equal.
#include <numeric>

#include "anabranch/cuda.h"
#include "dispatch_case.h"

namespace anabranch::testing {
namespace {

class SortChunksCuda : public CudaTest {};

// Sorts on both backends and compares. inverse = 1 inverts the sort.
template <class T>
void check_sort(int64_t D, const std::vector<int32_t>& sizes, const std::vector<int32_t>& order, int64_t R,
                int32_t dtype = kDtypeOf<T>, int64_t shift = 0) {
  SCOPED_TRACE(::testing::Message() << "R " << R << " D " << D << " S " << sizes.size() << " dtype " << dtype
                                    << " shift " << shift);
  const int64_t S = static_cast<int64_t>(sizes.size());
  Tensor<T> x({R, D}, dtype);
  for (int64_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i * 7 % 251);
  const Tensor<int32_t> split_sizes({S}, sizes);
  const Tensor<int32_t> sorted_indices({S}, order);
  for (const int32_t inverse : {0, 1}) {
    for (const bool requests_map : {true, false}) {
      const Tensor<T> want({R, D}, dtype);
      const Tensor<T> got({R, D}, dtype);
      const Tensor<int32_t> want_map({R});
      const Tensor<int32_t> got_map({R});
      ab_sort_chunks_args args{sizeof(args),          inverse,     x.view(),       split_sizes.view(),
                               sorted_indices.view(), want.view(), want_map.view()};
      EXPECT_OK(call(ab_sort_chunks, ab_sort_chunks_workspace, args));
      Mirrors mirrors;
      const int64_t bytes = shift * static_cast<int64_t>(sizeof(T));
      args = {sizeof(args),
              inverse,
              mirrors.add(x.view(), bytes),
              mirrors.add(split_sizes.view()),
              mirrors.add(sorted_indices.view()),
              mirrors.add(got.view(), bytes),
              requests_map ? mirrors.add(got_map.view()) : nullptr};
      size_t needed = 0;
      EXPECT_OK(ab_cuda_sort_chunks_workspace(&args, nullptr, &needed));
      DeviceWorkspace workspace(needed);
      EXPECT_OK(ab_cuda_sort_chunks(&args, &workspace.exec()));
      mirrors.fetch();
      workspace.check();
      ASSERT_TRUE(got.values() == want.values());
      ASSERT_TRUE(!requests_map || got_map.values() == want_map.values()) << "row_id_map";
    }
  }
}

std::vector<int32_t> random_sizes(int64_t S, int32_t max_size, std::mt19937* random) {
  std::vector<int32_t> sizes(static_cast<size_t>(S));
  for (int32_t& size : sizes) size = static_cast<int32_t>((*random)() % static_cast<unsigned>(max_size + 1));
  return sizes;
}

TEST_F(SortChunksCuda, AnyNumberOfChunks) {
  std::mt19937 random(1);
  for (const int64_t S : {0, 1, 2, 5, 31, 32, 33, 64, 100, 1000, 1023, 1024, 1025, 2100}) {
    for (const int32_t max_size : {0, 1, 7}) {
      const std::vector<int32_t> sizes = random_sizes(S, max_size, &random);
      std::vector<int32_t> order(static_cast<size_t>(S));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      for (const int64_t R : {sum, sum + 13, sum / 2}) {
        check_sort<uint16_t>(5, sizes, order, R);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(SortChunksCuda, GarbageStillPermutes) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const int64_t S = seed % 2 == 0 ? 12 : 1500;
    Tensor<int32_t> sizes({S});
    Tensor<int32_t> order({S});
    fill_with_garbage(&sizes, 40, seed);
    fill_with_garbage(&order, S, seed + 100);
    if (seed % 3 == 0) {
      for (int32_t& size : sizes.values()) size = std::clamp(size, 0, 3);
    }
    check_sort<float>(3, sizes.values(), order.values(), 900);
    if (HasFatalFailure()) return;
  }
}

TEST_F(SortChunksCuda, EveryWidthAndElement) {
  const std::vector<int32_t> sizes = {4, 0, 9, 1};
  const std::vector<int32_t> order = {2, 3, 1, 0};
  for (const int64_t D : {0, 1, 3, 8, 16, 33, 512, 1028, 5000}) {
    for (const int64_t shift : {0, 1}) {
      check_sort<uint8_t>(D, sizes, order, 16, AB_BOOL, shift);
      check_sort<uint8_t>(D, sizes, order, 16, AB_UINT8, shift);
      check_sort<int16_t>(D, sizes, order, 16, AB_INT16, shift);
      check_sort<int32_t>(D, sizes, order, 16, AB_INT32, shift);
      check_sort<int64_t>(D, sizes, order, 16, AB_INT64, shift);
      check_sort<uint16_t>(D, sizes, order, 16, AB_BFLOAT16, shift);
      check_sort<uint16_t>(D, sizes, order, 16, AB_FLOAT16, shift);
      check_sort<float>(D, sizes, order, 16, AB_FLOAT32, shift);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SortChunksCuda, ErrorMessagesMatchTheCpu) {
  const Tensor<float> x({4, 3});
  const Tensor<int32_t> sizes({2}, {1, 3});
  const Tensor<int32_t> order({2}, {1, 0});
  const auto refused = [&](auto change) {
    ab_sort_chunks_args args{sizeof(args), 0, x.view(), sizes.view(), order.view(), x.view(), nullptr};
    change(&args);
    const ab_status cuda = ab_cuda_sort_chunks(&args, nullptr);
    EXPECT_EQ(cuda.code, AB_INVALID_ARGUMENT);
    EXPECT_STREQ(cuda.message, ab_sort_chunks(&args, nullptr).message);
    size_t bytes = 0;
    EXPECT_EQ(ab_cuda_sort_chunks_workspace(&args, nullptr, &bytes).code, AB_INVALID_ARGUMENT);
  };
  refused([](ab_sort_chunks_args* args) { args->inverse = 2; });
  refused([](ab_sort_chunks_args* args) { args->x = nullptr; });
  refused([&](ab_sort_chunks_args* args) { args->out = sizes.view(); });
  refused([&](ab_sort_chunks_args* args) { args->sorted_indices = x.view(); });
  refused([&](ab_sort_chunks_args* args) { args->row_id_map = order.view(); });
  ab_sort_chunks_args args{sizeof(args), 0, x.view(), sizes.view(), order.view(), x.view(), nullptr};
  EXPECT_REFUSED(ab_cuda_sort_chunks(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
}

TEST_F(SortChunksCuda, ReplaysInAGraph) {
  constexpr int64_t R = 700;
  const Tensor<int32_t> sizes({3}, {100, 350, 200});
  const Tensor<int32_t> order({3}, {2, 0, 1});
  Tensor<float> x({R, 40});
  std::iota(x.values().begin(), x.values().end(), 0.0f);
  const Tensor<float> want({R, 40});
  const Tensor<float> got({R, 40});
  ab_sort_chunks_args args{sizeof(args), 0, x.view(), sizes.view(), order.view(), want.view(), nullptr};
  EXPECT_OK(call(ab_sort_chunks, ab_sort_chunks_workspace, args));
  Mirrors mirrors;
  args = {sizeof(args),
          0,
          mirrors.add(x.view()),
          mirrors.add(sizes.view()),
          mirrors.add(order.view()),
          mirrors.add(got.view()),
          nullptr};
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_sort_chunks_workspace(&args, nullptr, &bytes));
  DeviceWorkspace workspace(bytes);
  replay_in_graph([&](cudaStream_t stream) {
    workspace.exec().stream = stream;
    EXPECT_OK(ab_cuda_sort_chunks(&args, &workspace.exec()));
  });
  mirrors.fetch();
  EXPECT_TRUE(got.values() == want.values());
}

class RowIdMapCuda : public CudaTest {};

void check_expand(const Tensor<int32_t>& row_id_map, const Tensor<int32_t>* padding, int64_t T, int64_t E, int64_t R) {
  SCOPED_TRACE(::testing::Message() << "T " << T << " E " << E << " R " << R << " padding " << (padding != nullptr));
  struct Side {
    Side(int64_t T, int64_t E, int64_t R) : row_of_slot({T, E}), slot_of_row({R}) {
      for (Tensor<int32_t>* tensor : {&row_of_slot, &slot_of_row}) {
        for (int32_t& value : tensor->values()) value = 0x5a5a5a5a;  // not -1, which is a valid result
      }
    }
    Tensor<int32_t> row_of_slot;
    Tensor<int32_t> slot_of_row;
  };
  const Side want(T, E, R);
  const Side got(T, E, R);
  const ab_tensor* pad_offsets = padding == nullptr ? nullptr : padding->view();
  ab_expand_row_id_map_args args{sizeof(args), row_id_map.view(), pad_offsets, want.row_of_slot.view(),
                                 want.slot_of_row.view()};
  EXPECT_OK(ab_expand_row_id_map(&args, nullptr));
  Mirrors mirrors;
  args = {sizeof(args), mirrors.add(row_id_map.view()), mirrors.add(pad_offsets), mirrors.add(got.row_of_slot.view()),
          mirrors.add(got.slot_of_row.view())};
  EXPECT_OK(ab_cuda_expand_row_id_map(&args, nullptr));
  mirrors.fetch();
  ASSERT_TRUE(got.row_of_slot.values() == want.row_of_slot.values()) << "row_of_slot";
  ASSERT_TRUE(got.slot_of_row.values() == want.slot_of_row.values()) << "slot_of_row";
}

TEST_F(RowIdMapCuda, OfAPlan) {
  std::mt19937 random(5);
  for (const int64_t T : {0, 1, 9, 300}) {
    for (const int64_t E : {1, 7, 32, 33, 130}) {
      for (const int32_t align : {0, 8}) {
        Tensor<uint8_t> routed({T, E}, AB_BOOL);
        for (uint8_t& value : routed.values()) value = random() % 4 == 0 ? 1 : 0;
        const int64_t a = std::max(align, 1);
        const int64_t R = (T * E + E * (a - 1)) / a * a;
        const Tensor<int32_t> row_id_map({T, 2 * E + 1});
        const Tensor<int32_t> offsets({E + 1});
        const Tensor<int32_t> counts({E});
        const Tensor<int32_t> slots({R});
        ab_plan_args plan{};
        plan.size = sizeof(plan);
        plan.num_experts = static_cast<int32_t>(E);
        plan.align_size = align;
        plan.routing_map = routed.view();
        plan.tokens_per_expert = counts.view();
        plan.offsets = offsets.view();
        plan.slot_of_row = slots.view();
        plan.row_id_map = row_id_map.view();
        EXPECT_OK(call(ab_plan, ab_plan_workspace, plan));
        Tensor<int32_t> padding({E});
        int32_t packed = 0;
        for (int64_t e = 0; e < E; ++e) {
          padding[e] = offsets[e] - packed;
          packed += counts[e];
        }
        check_expand(row_id_map, &padding, T, E, R);
        check_expand(row_id_map, nullptr, T, E, R / 3);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RowIdMapCuda, Garbage) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const int64_t T = 400;
    const int64_t E = seed % 2 == 0 ? 20 : 70;
    Tensor<int32_t> row_id_map({T, 2 * E + 1});
    Tensor<int32_t> padding({E});
    fill_with_garbage(&row_id_map, E, seed);
    fill_with_garbage(&padding, 600, seed + 50);
    check_expand(row_id_map, seed % 3 == 0 ? nullptr : &padding, T, E, 700);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RowIdMapCuda, ErrorMessagesMatchTheCpu) {
  const Tensor<int32_t> row_id_map({4, 5});
  const Tensor<int32_t> row_of_slot({4, 2});
  const Tensor<int32_t> slot_of_row({8});
  const auto refused = [&](auto change) {
    ab_expand_row_id_map_args args{sizeof(args), row_id_map.view(), nullptr, row_of_slot.view(), slot_of_row.view()};
    change(&args);
    const ab_status cuda = ab_cuda_expand_row_id_map(&args, nullptr);
    EXPECT_EQ(cuda.code, AB_INVALID_ARGUMENT);
    EXPECT_STREQ(cuda.message, ab_expand_row_id_map(&args, nullptr).message);
  };
  refused([](ab_expand_row_id_map_args* args) { args->size = 0; });
  refused([&](ab_expand_row_id_map_args* args) { args->row_id_map = row_of_slot.view(); });
  refused([&](ab_expand_row_id_map_args* args) { args->pad_offsets = slot_of_row.view(); });
  refused([&](ab_expand_row_id_map_args* args) { args->slot_of_row = row_of_slot.view(); });
}

}  // namespace
}  // namespace anabranch::testing
