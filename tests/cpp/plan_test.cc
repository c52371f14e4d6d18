#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "dispatch_operands.h"

namespace anabranch::testing {
namespace {

// Compares with the definition of the plan, computed expert by expert and slot by slot.
void expect_plan(const Plan& plan, const std::vector<int32_t>& experts, int64_t E, int64_t align, int64_t R) {
  std::vector<int32_t> row_of_slot(experts.size(), -1);
  std::vector<int32_t> slot_of_row(static_cast<size_t>(R), -1);
  int64_t start = 0;
  int32_t dropped = 0;
  for (const int32_t expert : experts) dropped += expert < -1 || expert >= E;
  for (int64_t e = 0; e < E; ++e) {
    int64_t row = start;
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] != e) continue;
      if (row < R) {
        row_of_slot[slot] = static_cast<int32_t>(row);
        slot_of_row[static_cast<size_t>(row)] = static_cast<int32_t>(slot);
      } else {
        ++dropped;
      }
      ++row;
    }
    EXPECT_EQ(plan.tokens_per_expert[e], row - start) << "expert " << e;
    EXPECT_EQ(plan.offsets[e], std::min(start, R)) << "expert " << e;
    start += (row - start + align - 1) / align * align;
    EXPECT_EQ(plan.offsets[e + 1], std::min(start, R)) << "expert " << e;
    EXPECT_EQ(plan.group_sizes[e], plan.offsets[e + 1] - plan.offsets[e]) << "expert " << e;
  }
  EXPECT_EQ(plan.row_of_slot.values(), row_of_slot);
  EXPECT_EQ(plan.slot_of_row.values(), slot_of_row);
  EXPECT_EQ(plan.dropped[0], dropped);
}

TEST(Plan, ElementsAfterTheNumberOfDroppedSlotsAreZero) {
  const Tensor<int32_t> experts({2, 2}, {0, 5, 1, 0});
  const Plan plan(2, 2, 2, 2);
  const Tensor<int32_t> dropped({3}, {7, 7, 7});
  ab_plan_args args = plan_args(&experts, nullptr, 2, 0, plan);
  args.dropped = dropped.view();
  EXPECT_OK(call(ab_plan, ab_plan_workspace, args));
  EXPECT_EQ(dropped.values(), (std::vector<int32_t>{2, 0, 0}));
}

TEST(Plan, MatchesTheDefinition) {
  for (const int64_t T : {0, 1, 7, 600}) {
    for (const int64_t E : {1, 3, 64, 130}) {
      for (const int64_t K : {int64_t{1}, std::min<int64_t>(E, 8)}) {
        for (const int32_t align : {0, 1, 8}) {
          const int64_t a = std::max(align, 1);
          for (const int64_t R : {int64_t{0}, T * K / 2 / a * a, (T * K + E * (a - 1) + 3 * a) / a * a}) {
            const std::vector<int32_t> experts = indices(T * K, -2, static_cast<int32_t>(E), 1);
            const Tensor<int32_t> input({T, K}, experts);
            const Plan plan(T, K, E, R);
            EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(&input, nullptr, E, align, plan)));
            SCOPED_TRACE(::testing::Message() << "T " << T << " E " << E << " K " << K << " a " << a << " R " << R);
            expect_plan(plan, experts, E, a, R);
          }
        }
      }
    }
  }
}

TEST(Plan, AcceptsIndicesOfAnyWidth) {
  constexpr int64_t T = 40, K = 3, E = 5, R = T * K;
  const std::vector<int32_t> experts = indices(T * K, -2, static_cast<int32_t>(E), 2);
  std::vector<int16_t> narrow(experts.begin(), experts.end());
  std::vector<int64_t> wide(experts.begin(), experts.end());
  // Indices that are in range in their last 32 bits.
  wide[0] = int64_t{1} << 32;
  wide[1] = (int64_t{1} << 32) - 1;
  wide[2] = -(int64_t{1} << 32);
  std::vector<int32_t> with_large = experts;
  for (size_t i = 0; i < 3; ++i) with_large[i] = static_cast<int32_t>(E);

  const Tensor<int16_t> narrow_input({T, K}, narrow);
  const Tensor<int64_t> wide_input({T, K}, wide);
  for (const auto& [input, want] :
       {std::pair{narrow_input.view(), experts}, std::pair{wide_input.view(), with_large}}) {
    const Plan plan(T, K, E, R);
    ab_plan_args args = plan_args(nullptr, nullptr, E, 0, plan);
    args.experts = input;
    EXPECT_OK(call(ab_plan, ab_plan_workspace, args));
    expect_plan(plan, want, E, 1, R);
  }
}

// The plan for some of the experts is that of experts without the others.
TEST(Plan, APartOfTheExperts) {
  const int64_t T = 300;
  const int64_t K = 4;
  const int64_t E = 3;
  const int64_t R = 200;
  const std::vector<int32_t> experts = indices(T * K, -2, 12, 3);
  const Tensor<int32_t> input({T, K}, experts);
  for (const int32_t first : {0, 5, 11, INT32_MAX}) {
    SCOPED_TRACE(::testing::Message() << "first " << first);
    std::vector<int32_t> local = experts;
    for (int32_t& expert : local) expert = expert >= first && expert - first < E ? expert - first : -1;
    const Plan plan(T, K, E, R);
    ab_plan_args args = plan_args(&input, nullptr, E, 8, plan);
    args.is_part = 1;
    args.first_expert = first;
    EXPECT_OK(call(ab_plan, ab_plan_workspace, args));
    expect_plan(plan, local, E, 8, R);
  }
  const Plan plan(T, K, E, R);
  ab_plan_args args = plan_args(&input, nullptr, E, 8, plan);
  args.first_expert = 2;
  EXPECT_REFUSED(call(ab_plan, ab_plan_workspace, args), AB_INVALID_ARGUMENT,
                 "first_expert: got 2, expected 0 without is_part");
  args.is_part = 2;
  EXPECT_REFUSED(call(ab_plan, ab_plan_workspace, args), AB_INVALID_ARGUMENT, "is_part: got 2, expected 0 or 1");
  args.is_part = 1;
  args.first_expert = -1;
  EXPECT_REFUSED(call(ab_plan, ab_plan_workspace, args), AB_INVALID_ARGUMENT, "first_expert: got -1");
}

TEST(Plan, AcceptsARoutingMapOfTokensByExperts) {
  for (const int64_t E : {1, 7, 8, 29}) {
    const int64_t T = 300;
    const int64_t R = 1600;
    std::vector<uint8_t> routed(static_cast<size_t>(T * E));
    std::vector<int32_t> experts(routed.size(), -1);
    const std::vector<int32_t> coin = indices(T * E, 0, 5, 7);
    for (size_t i = 0; i < routed.size(); ++i) {
      routed[i] = coin[i] == 0;
      if (routed[i]) experts[i] = static_cast<int32_t>(i % static_cast<size_t>(E));
    }
    const Tensor<uint8_t> input({T, E}, routed, AB_BOOL);
    const Plan plan(T, E, E, R);
    Tensor<int32_t> row_id_map({T, 2 * E + 1});
    ab_plan_args args = plan_args(nullptr, &input, E, 8, plan);
    args.row_id_map = row_id_map.view();
    EXPECT_OK(call(ab_plan, ab_plan_workspace, args));
    expect_plan(plan, experts, E, 8, R);

    // Expand the row_id_map, given the padding before each expert. The result must be the plan's index tensors.
    Tensor<int32_t> padding({E});
    int32_t packed = 0;
    for (int64_t e = 0; e < E; ++e) {
      padding[e] = plan.offsets[e] - packed;
      packed += plan.tokens_per_expert[e];
    }
    Tensor<int32_t> row_of_slot({T, E});
    Tensor<int32_t> slot_of_row({R});
    ab_expand_row_id_map_args expand{sizeof(expand), row_id_map.view(), padding.view(), row_of_slot.view(),
                                     slot_of_row.view()};
    EXPECT_OK(ab_expand_row_id_map(&expand, nullptr));
    EXPECT_EQ(row_of_slot.values(), plan.row_of_slot.values());
    EXPECT_EQ(slot_of_row.values(), plan.slot_of_row.values());
    for (int64_t t = 0; t < T; ++t) {
      const int32_t* ids = &row_id_map[t * (2 * E + 1)];
      const int32_t n = ids[2 * E];
      EXPECT_EQ(n, std::count(routed.begin() + t * E, routed.begin() + (t + 1) * E, 1));
      EXPECT_TRUE(std::is_sorted(ids, ids + n, std::greater<>()));
      EXPECT_EQ(std::count(ids + n, ids + E, -1), E - n);
      EXPECT_EQ(std::count(ids + E + n, ids + 2 * E, -1), E - n);
    }
  }
}

TEST(Plan, IsTheSameForEveryThreadCount) {
  const int64_t T = 20000;
  const int64_t K = 4;
  const int64_t E = 70;
  const int64_t R = 70000;
  const Tensor<int32_t> experts({T, K}, indices(T * K, -3, E + 2, 3));
  const Plan one(T, K, E, R);
  EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(&experts, nullptr, E, 8, one), 1));
  expect_plan(one, experts.values(), E, 8, R / 8 * 8);
  for (const int threads : {2, 3, 8}) {
    const Plan many(T, K, E, R);
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(&experts, nullptr, E, 8, many), threads));
    EXPECT_EQ(one.values(), many.values()) << threads << " threads";
  }
}

TEST(Plan, BitMapMatchesByteMap) {
  constexpr int64_t T = 70;
  for (const int64_t E : {1, 8, 13, 64}) {
    std::mt19937 random(7);
    Tensor<uint8_t> bytes({T, E}, AB_BOOL);
    Tensor<uint8_t> bits({T, (E + 7) / 8}, std::vector<uint8_t>(static_cast<size_t>(T * ((E + 7) / 8))));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t e = 0; e < E; ++e) {
        const bool routed = random() % 4 == 0;
        bytes[t * E + e] = routed ? 1 : 0;
        uint8_t& byte = bits[t * ((E + 7) / 8) + e / 8];
        byte = static_cast<uint8_t>(byte | (routed ? 1u : 0u) << (e % 8));
      }
    }
    const int64_t R = T * E / 2 / 4 * 4;
    const Plan from_bytes(T, E, E, R);
    const Plan from_bits(T, E, E, R);
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(nullptr, &bytes, E, 4, from_bytes)));
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(nullptr, &bits, E, 4, from_bits)));
    EXPECT_EQ(from_bits.values(), from_bytes.values());
  }
}

TEST(Plan, RefusesBadArguments) {
  const Tensor<int32_t> experts({4, 2}, indices(8, 0, 2, 1));
  const Tensor<uint8_t> routed({4, 3}, std::vector<uint8_t>(12), AB_BOOL);
  const Plan plan(4, 2, 3, 8);
  const auto refused = [&](const char* text, auto change) {
    ab_plan_args args = plan_args(&experts, nullptr, 3, 0, plan);
    change(&args);
    EXPECT_REFUSED(call(ab_plan, ab_plan_workspace, args), AB_INVALID_ARGUMENT, text);
  };
  EXPECT_REFUSED(ab_plan(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_plan_args: got NULL");
  refused("ab_plan_args: got size 3", [](ab_plan_args* args) { args->size = 3; });
  refused("num_experts: got 0, expected at least 1", [](ab_plan_args* args) { args->num_experts = 0; });
  refused("align_size: got -1, expected at least 0", [](ab_plan_args* args) { args->align_size = -1; });
  refused("num_destinations: got 2, expected a divisor of 3 experts",
          [](ab_plan_args* args) { args->num_destinations = 2; });
  refused("num_destinations: got -1", [](ab_plan_args* args) { args->num_destinations = -1; });
  refused("slot_of_row: got 8 rows, expected a multiple of align_size 1 for each destination",
          [](ab_plan_args* args) { args->num_destinations = 3; });
  const Tensor<uint8_t> bits({4, 2}, std::vector<uint8_t>(8));
  refused("routing_map: got uint8 (2) [4, 2], expected bool or uint8 [T, ceil(E/8)=1]", [&](ab_plan_args* args) {
    args->experts = nullptr;
    args->routing_map = bits.view();
  });
  refused("slot_of_row: got 8 rows, expected a multiple of align_size 3",
          [](ab_plan_args* args) { args->align_size = 3; });
  refused("experts: got neither it nor routing_map", [](ab_plan_args* args) { args->experts = nullptr; });
  refused("experts: got it and routing_map", [&](ab_plan_args* args) { args->routing_map = routed.view(); });
  refused("slot_of_row: got NULL", [](ab_plan_args* args) { args->slot_of_row = nullptr; });
  refused("tokens_per_expert: got int32 (4) [3], expected int32 [E=5]",
          [](ab_plan_args* args) { args->num_experts = 5; });
  refused("row_of_slot: got int32 (4) [3], expected int32 [T=4, K=2]",
          [](ab_plan_args* args) { args->row_of_slot = args->group_sizes; });
  refused("dropped: got int32 (4) [4, 2]", [](ab_plan_args* args) { args->dropped = args->row_of_slot; });
  const Tensor<int32_t> none({0});
  refused("dropped: got [0], expected a scalar", [&](ab_plan_args* args) { args->dropped = none.view(); });
  refused("experts: got bool (1) [4, 3], expected int16 or int32 or int64 [T, K]",
          [&](ab_plan_args* args) { args->experts = routed.view(); });
  Tensor<int32_t> row_id_map({4, 7});
  refused("row_id_map: got one together with experts",
          [&](ab_plan_args* args) { args->row_id_map = row_id_map.view(); });
  const ab_plan_args args = plan_args(&experts, nullptr, 3, 0, plan);
  EXPECT_REFUSED(ab_plan(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");

  Tensor<int32_t> huge({1, 2});
  huge.mutable_view()->shape[0] = int64_t{1} << 30;
  refused("experts: got 1073741824 x 2 slots, expected fewer than 2^31",
          [&](ab_plan_args* args) { args->experts = huge.view(); });
  Tensor<int32_t> no_slots({4, 0});
  refused("experts: got K 0", [&](ab_plan_args* args) { args->experts = no_slots.view(); });
  Tensor<int32_t> rows({1});
  rows.mutable_view()->shape[0] = int64_t{1} << 31;
  refused("slot_of_row: got 2147483648 rows, expected fewer than 2^31",
          [&](ab_plan_args* args) { args->slot_of_row = rows.view(); });
}

}  // namespace
}  // namespace anabranch::testing
