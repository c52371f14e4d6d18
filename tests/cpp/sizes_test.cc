// Sizes beyond any memory are refused by the argument's name, even if their byte count wraps to a small number.
#include <gtest/gtest.h>

#include "anabranch/balance.h"
#include "anabranch/router.h"
#include "dispatch_operands.h"
#include "experts_operands.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

// Returns a view without memory, which is valid only for a tensor without elements.
ab_tensor no_memory(int32_t dtype, std::initializer_list<int64_t> shape) {
  ab_tensor view{nullptr, dtype, static_cast<int32_t>(shape.size()), {}, nullptr};
  std::copy(shape.begin(), shape.end(), view.shape);
  return view;
}

TEST(Sizes, ThatOverflowAreRefused) {
  const Tensor<int32_t> row_of_slot({2, 1}, {0, 1});
  const Tensor<int32_t> slot_of_row({4}, {0, 1, -1, -1});
  const ab_tensor rows = no_memory(AB_FLOAT32, {4, kHuge});  // 2^66 bytes wrap to 0
  const ab_tensor tokens = no_memory(AB_FLOAT32, {2, kHuge});
  const ab_combine_args combine{sizeof(combine), &rows, row_of_slot.view(), nullptr, &tokens, nullptr};
  EXPECT_REFUSED(call(ab_combine, ab_combine_workspace, combine), AB_INVALID_ARGUMENT,
                 "rows: got float32 [4, 4611686018427387904], expected sizes whose product is at most 2^56 bytes");
  const ab_dispatch_args dispatch{sizeof(dispatch), &tokens, row_of_slot.view(), slot_of_row.view(), nullptr, &rows};
  EXPECT_REFUSED(ab_dispatch(&dispatch, nullptr), AB_INVALID_ARGUMENT, "x: got float32 [2, 4611686018427387904]");

  const ab_tensor square = no_memory(AB_FLOAT32, {int64_t{1} << 32, int64_t{1} << 32});
  const ab_tensor sum = no_memory(AB_FLOAT32, {int64_t{1} << 32});
  const ab_score_sum_args score_sum{sizeof(score_sum), &square, &sum};
  EXPECT_REFUSED(call(ab_score_sum, ab_score_sum_workspace, score_sum), AB_INVALID_ARGUMENT, "scores: got float32");

  const Tensor<int32_t> count(std::vector<int64_t>{}, std::vector<int32_t>{1});
  const ab_load_balance_loss_args loss{sizeof(loss), 1, 1.0f, &square, &square, count.view(), nullptr, nullptr};
  EXPECT_REFUSED(ab_load_balance_loss(&loss, nullptr), AB_INVALID_ARGUMENT, "score_sum: got float32");
}

TEST(Sizes, OfEmptyTensorsAreBounded) {
  const ab_tensor x = no_memory(AB_FLOAT32, {0, kHuge});
  const ab_tensor w = no_memory(AB_FLOAT32, {0, kHuge, 1});
  const ab_tensor groups = no_memory(AB_INT32, {0});
  const ab_tensor y = no_memory(AB_FLOAT32, {0, 1});
  const ab_grouped_matmul_args args = grouped_matmul_args(&x, &w, &groups, &y);
  EXPECT_REFUSED(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args), AB_INVALID_ARGUMENT, "x: got float32 [0,");

  // A loop over these empty rows and sequences would never end.
  const ab_tensor none = no_memory(AB_FLOAT32, {0, 0});
  const ab_tensor sequences = no_memory(AB_FLOAT32, {(int64_t{1} << 61) + 1, 0});
  for (const auto& [scores, sum] : {std::pair{&none, &sequences}, std::pair{&sequences, &none}}) {
    const ab_score_sum_args score_sum{sizeof(score_sum), scores, sum};
    EXPECT_REFUSED(call(ab_score_sum, ab_score_sum_workspace, score_sum), AB_INVALID_ARGUMENT,
                   "2305843009213693953, 0]");
  }
  const ab_tensor tall = no_memory(AB_FLOAT32, {int64_t{1} << 50, 0});
  const ab_tensor columns = no_memory(AB_FLOAT32, {0});
  const ab_score_sum_args score_sum{sizeof(score_sum), &tall, &columns};
  EXPECT_OK(call(ab_score_sum, ab_score_sum_workspace, score_sum));
}

TEST(Sizes, OfAWorkspaceDoNotOverflow) {
  const int64_t R = int64_t{1} << 24;
  const int64_t N = int64_t{1} << 38;
  Tensor<int32_t> slot_of_row({R});
  const ab_tensor x = no_memory(AB_FLOAT32, {R, 0});
  const ab_tensor w = no_memory(AB_FLOAT32, {1, 0, N});
  const Tensor<int32_t> groups({1}, std::vector<int32_t>{0});
  const ab_tensor row_of_slot = no_memory(AB_INT32, {0, 1});
  const ab_tensor out = no_memory(AB_FLOAT32, {0, N});
  ab_grouped_matmul_combine_args args{};
  args.size = sizeof(args);
  args.x = &x;
  args.w = &w;
  args.group_sizes = groups.view();
  args.slot_of_row = slot_of_row.view();
  args.row_of_slot = &row_of_slot;
  args.out = &out;
  size_t bytes = 0;
  EXPECT_REFUSED(ab_grouped_matmul_combine_workspace(&args, nullptr, &bytes), AB_UNSUPPORTED, "workspace: got sizes");
  alignas(64) char some[64];
  const ab_exec exec{sizeof(exec), 1, nullptr, some, SIZE_MAX};
  EXPECT_REFUSED(ab_grouped_matmul_combine(&args, &exec), AB_UNSUPPORTED, "workspace: got sizes");
}

TEST(Sizes, OfAnAdapterDoNotOverflow) {
  const int64_t R = int64_t{1} << 24;
  const int64_t rank = int64_t{1} << 38;
  const ab_tensor x = no_memory(AB_FLOAT32, {R, 0}), y = no_memory(AB_FLOAT32, {R, 0});
  const ab_tensor w = no_memory(AB_FLOAT32, {1, 0, 0});
  const ab_tensor a = no_memory(AB_FLOAT32, {1, 0, rank}), b = no_memory(AB_FLOAT32, {1, rank, 0});
  const Tensor<int32_t> groups({1}, std::vector<int32_t>{0});
  ab_grouped_matmul_args args = grouped_matmul_args(&x, &w, groups.view(), &y);
  args.lora_a = &a;
  args.lora_b = &b;
  size_t bytes = 0;
  EXPECT_REFUSED(ab_grouped_matmul_workspace(&args, nullptr, &bytes), AB_UNSUPPORTED, "workspace: got sizes");
}

TEST(Sizes, OfSlotsDoNotOverflow) {
  const int64_t T = int64_t{1} << 50;
  const ab_tensor x = no_memory(AB_FLOAT32, {T, 0});
  const ab_tensor w_in = no_memory(AB_FLOAT32, {0, 0, 1, 1});
  const ab_tensor w_out = no_memory(AB_FLOAT32, {0, 1, 0});
  const ab_tensor none = no_memory(AB_INT32, {0});
  const ab_tensor y = no_memory(AB_FLOAT32, {0, 0});
  ab_expert_ffn_forward_args args{};
  args.size = sizeof(args);
  args.topk = 1 << 20;  // 2^70 slots
  args.x = &x;
  args.slot_of_row = args.group_sizes = &none;
  args.w_in = &w_in;
  args.w_out = &w_out;
  args.y = &y;
  EXPECT_REFUSED(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args), AB_INVALID_ARGUMENT,
                 "slot_of_row: got 1125899906842624 x 1048576 slots, expected fewer than 2^31");
}

TEST(Sizes, OfRowsWithoutColumnsCopyNothing) {
  const Tensor<int32_t> row_of_slot({2, 1}, {0, 1});
  const Tensor<int32_t> slot_of_row({2}, {0, 1});
  const ab_tensor nothing = no_memory(AB_FLOAT32, {2, 0});
  const Tensor<float> d_weights({2, 1});
  ab_combine_backward_args args{};
  args.size = sizeof(args);
  args.d_out = args.rows = args.d_rows = &nothing;
  args.row_of_slot = row_of_slot.view();
  args.slot_of_row = slot_of_row.view();
  args.d_weights = d_weights.view();
  EXPECT_OK(ab_combine_backward(&args, nullptr));
  EXPECT_EQ(d_weights.values(), (std::vector<float>{0, 0}));
}

// The size of d_rows is not computed if d_rows is not requested.
TEST(Sizes, OfRowsNotRequestedDoNotOverflow) {
  const Tensor<int32_t> slot_of_row({300});
  const ab_tensor row_of_slot = no_memory(AB_INT32, {0, 1});
  const ab_tensor d_out = no_memory(AB_FLOAT32, {0, int64_t{1} << 54});
  ab_combine_backward_args args{};
  args.size = sizeof(args);
  args.d_out = &d_out;
  args.row_of_slot = &row_of_slot;
  args.slot_of_row = slot_of_row.view();
  EXPECT_OK(ab_combine_backward(&args, nullptr));
}

TEST(Sizes, OfThreadsAreBounded) {
  const int64_t T = 40000;
  const Tensor<int32_t> experts({T, 1}, indices(T, 0, 3, 1));
  const Plan plan(T, 1, 4, T);
  const ab_plan_args args = plan_args(&experts, nullptr, 4, 0, plan);
  for (const int32_t threads : {1 << 30, 1 << 29, kLargest, 4097, -1, -5, kLowest}) {
    EXPECT_REFUSED(call(ab_plan, ab_plan_workspace, args, threads), AB_INVALID_ARGUMENT,
                   ("exec: got num_threads " + std::to_string(threads) + ", expected 0 (the default) to 4096").c_str());
  }
  EXPECT_OK(call(ab_plan, ab_plan_workspace, args, 4096));
}

TEST(Sizes, RefuseANullResult) {
  const Tensor<float> scores({2, 3}, {1, 2, 3, 4, 5, 6});
  const Tensor<float> sum({3});
  const ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
  EXPECT_REFUSED(ab_score_sum_workspace(&args, nullptr, nullptr), AB_INVALID_ARGUMENT, "bytes: got NULL");
}

// The router pads lists of experts to the next power of two, which must fit into int32.
TEST(Sizes, OfExpertsAreAtMostTwoToTheThirty) {
  const ab_tensor logits = no_memory(AB_FLOAT32, {0, kLargest});
  const ab_tensor experts = no_memory(AB_INT32, {0, kLargest});
  ab_router_forward_args args{};
  args.size = sizeof(args);
  args.topk = kLargest;
  args.scaling_factor = 1.0f;
  args.logits = &logits;
  args.experts = &experts;
  EXPECT_REFUSED(call(ab_router_forward, ab_router_forward_workspace, args), AB_INVALID_ARGUMENT,
                 "logits: got 2147483647 experts, expected at most 2^30");
}

// Each thread writes the rows and weights of its current token to its own cache line.
TEST(Sizes, OfCombineGiveEachThreadACacheLine) {
  const Tensor<float> rows({4, 8}), out({2, 8});
  const Tensor<int32_t> row_of_slot({2, 2});
  const ab_combine_args args{sizeof(args), rows.view(), row_of_slot.view(), nullptr, out.view(), nullptr};
  const ab_exec exec{sizeof(exec), 8, nullptr, nullptr, 0};
  size_t bytes = 0;
  EXPECT_OK(ab_combine_workspace(&args, &exec, &bytes));
  EXPECT_EQ(bytes, 8u * 64);
}

}  // namespace
}  // namespace anabranch::testing
