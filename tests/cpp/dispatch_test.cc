#include "anabranch/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support.h"

namespace anabranch::testing {
namespace {

constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
constexpr int32_t kFloatDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

std::vector<float> normal(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = distribution(random);
  return values;
}

std::vector<int32_t> indices(int64_t size, int32_t low, int32_t high, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> distribution(low, high);
  std::vector<int32_t> values(static_cast<size_t>(size));
  for (int32_t& value : values) value = distribution(random);
  return values;
}

// Anything an index buffer may hold by accident: small, large, negative, extreme.
std::vector<int32_t> garbage(int64_t size, int64_t limit, uint32_t seed) {
  std::vector<int32_t> values = indices(size, -3, static_cast<int32_t>(limit) + 3, seed);
  for (size_t i = 0; i < values.size(); i += 5) values[i] = i % 2 == 0 ? kLowest : kLargest;
  return values;
}

void fill(Tensor<int32_t>* tensor, const std::vector<int32_t>& values) {
  ASSERT_EQ(tensor->values().size(), values.size());
  std::copy(values.begin(), values.end(), tensor->values().begin());
}

struct Plan {
  Tensor<int32_t> tokens_per_expert, group_sizes, offsets, row_of_slot, slot_of_row, dropped;

  Plan(int64_t T, int64_t K, int64_t E, int64_t R)
      : tokens_per_expert({E}),
        group_sizes({E}),
        offsets({E + 1}),
        row_of_slot({T, K}),
        slot_of_row({R}),
        dropped(std::vector<int64_t>{}) {}

  std::vector<std::vector<int32_t>> values() const {
    return {tokens_per_expert.values(), group_sizes.values(), offsets.values(),
            row_of_slot.values(),       slot_of_row.values(), dropped.values()};
  }
};

ab_plan_args plan_args(const Tensor<int32_t>* experts, const Tensor<uint8_t>* routing_map, int64_t E, int32_t align,
                       const Plan& plan) {
  ab_plan_args args{};
  args.size = sizeof(args);
  args.num_experts = static_cast<int32_t>(E);
  args.align_size = align;
  args.experts = experts == nullptr ? nullptr : experts->view();
  args.routing_map = routing_map == nullptr ? nullptr : routing_map->view();
  args.tokens_per_expert = plan.tokens_per_expert.view();
  args.group_sizes = plan.group_sizes.view();
  args.offsets = plan.offsets.view();
  args.row_of_slot = plan.row_of_slot.view();
  args.slot_of_row = plan.slot_of_row.view();
  args.dropped = plan.dropped.view();
  return args;
}

// The plan as the definition says it: expert by expert, slot by slot.
void expect_is_the_plan(const Plan& plan, const std::vector<int32_t>& experts, int64_t E, int64_t align, int64_t R) {
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

TEST(Plan, IsTheDefinition) {
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
            expect_is_the_plan(plan, experts, E, a, R);
          }
        }
      }
    }
  }
}

TEST(Plan, TakesARoutingMapWithASlotForEveryPair) {
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
    expect_is_the_plan(plan, experts, E, 8, R);

    // read with the padding before every expert, the map gives the same two maps
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
  expect_is_the_plan(one, experts.values(), E, 8, R / 8 * 8);
  for (const int threads : {2, 3, 8}) {
    const Plan many(T, K, E, R);
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(&experts, nullptr, E, 8, many), threads));
    EXPECT_EQ(one.values(), many.values()) << threads << " threads";
  }
}

// Plan, operands and results of one dispatch and combine in float32.
struct Layer {
  int64_t T, K, E, D, R;
  Plan plan;
  Tensor<float> x, weights, rows, expert_rows, out, d_out, d_rows, d_weights;

  Layer(int64_t T, int64_t K, int64_t E, int64_t D, int32_t align = 0, int64_t limit = kLargest)
      : T(T),
        K(K),
        E(E),
        D(D),
        R(std::min(limit, T * K + E * std::max(align - 1, 0)) / std::max(align, 1) * std::max(align, 1)),
        plan(T, K, E, R),
        x({T, D}, normal(T * D, 1)),
        weights({T, K}, normal(T * K, 2)),
        rows({R, D}),
        expert_rows({R, D}, normal(R * D, 3)),
        out({T, D}),
        d_out({T, D}, normal(T * D, 4)),
        d_rows({R, D}),
        d_weights({T, K}) {
    const Tensor<int32_t> experts({T, K}, indices(T * K, -1, static_cast<int32_t>(E) - 1, 5));
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan_args(&experts, nullptr, E, align, plan)));
  }

  ab_dispatch_args dispatch() const {
    return {sizeof(ab_dispatch_args), x.view(), plan.row_of_slot.view(), plan.slot_of_row.view(), nullptr, rows.view()};
  }
  ab_combine_args combine() const {
    return {sizeof(ab_combine_args), expert_rows.view(), plan.row_of_slot.view(), weights.view(), out.view(), nullptr};
  }
  ab_combine_backward_args combine_backward() const {
    return {sizeof(ab_combine_backward_args), d_out.view(),   expert_rows.view(), plan.row_of_slot.view(),
            plan.slot_of_row.view(),          weights.view(), d_rows.view(),      d_weights.view()};
  }
  void run(int threads) const {
    EXPECT_OK(call(ab_dispatch, {}, dispatch(), threads));
    EXPECT_OK(call(ab_combine, ab_combine_workspace, combine(), threads));
    EXPECT_OK(call(ab_combine_backward, {}, combine_backward(), threads));
  }
  std::vector<std::vector<float>> results() const {
    return {rows.values(), out.values(), d_rows.values(), d_weights.values()};
  }
};

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

TEST(Dispatch, CopiesEveryTokenToItsRowsAndClearsTheOthers) {
  for (const int64_t limit : {int64_t{kLargest}, int64_t{80}}) {
    const Layer layer(50, 3, 6, 37, 8, limit);
    EXPECT_OK(call(ab_dispatch, {}, layer.dispatch()));
    for (int64_t row = 0; row < layer.R; ++row) {
      const int32_t slot = layer.plan.slot_of_row[row];
      for (int64_t i = 0; i < layer.D; ++i) {
        EXPECT_EQ(layer.rows[row * layer.D + i], slot < 0 ? 0.0f : layer.x[slot / layer.K * layer.D + i]);
      }
    }
  }
}

TEST(Combine, AndItsGradientsAreTheFormulas) {
  for (const int64_t D : {1, 37, 64, 513, 1100}) {
    const Layer layer(40, 3, 6, D, 8, 96);
    layer.run(0);
    for (int64_t t = 0; t < layer.T; ++t) {
      std::vector<double> want(static_cast<size_t>(D));
      std::vector<double> size(static_cast<size_t>(D));
      for (int64_t slot = t * layer.K; slot < (t + 1) * layer.K; ++slot) {
        const int32_t row = layer.plan.row_of_slot[slot];
        double product = 0;
        double products = 0;
        for (int64_t i = 0; i < D && row >= 0; ++i) {
          const double term = double{layer.weights[slot]} * double{layer.expert_rows[row * D + i]};
          want[static_cast<size_t>(i)] += term;
          size[static_cast<size_t>(i)] += std::abs(term);
          const double one = double{layer.d_out[t * D + i]} * double{layer.expert_rows[row * D + i]};
          product += one;
          products += std::abs(one);
          EXPECT_EQ(layer.d_rows[row * D + i], layer.weights[slot] * layer.d_out[t * D + i]);
        }
        EXPECT_NEAR(layer.d_weights[slot], product, 1e-6 * products) << "slot " << slot;
      }
      for (int64_t i = 0; i < D; ++i) {
        EXPECT_NEAR(layer.out[t * D + i], want[static_cast<size_t>(i)], 3e-7 * size[static_cast<size_t>(i)]);
      }
    }
    for (int64_t row = 0; row < layer.R; ++row) {
      if (layer.plan.slot_of_row[row] >= 0) continue;
      for (int64_t i = 0; i < D; ++i) EXPECT_EQ(layer.d_rows[row * D + i], 0.0f);
    }
  }
}

TEST(Combine, TakesEmptyTensors) {
  for (const auto& [T, D] : {std::pair<int64_t, int64_t>{0, 8}, {5, 0}, {0, 0}}) {
    const Layer layer(T, 2, 3, D, 8);
    layer.run(0);
    EXPECT_EQ(layer.d_weights.values(), std::vector<float>(static_cast<size_t>(T * 2), 0.0f));
    for (const float value : layer.rows.values()) EXPECT_EQ(value, 0.0f);
    for (const float value : layer.d_rows.values()) EXPECT_EQ(value, 0.0f);
  }
  const Tensor<float> x({4, 0});
  Sorted sorted{Tensor<float>({4, 0}), Tensor<int32_t>({4})};
  sort_chunks(x, {1, 3}, {1, 0}, 0, &sorted);
  EXPECT_EQ(sorted.row_id_map.values(), (std::vector<int32_t>{3, 0, 1, 2}));
}

TEST(Combine, HasTheSameBitsForEveryThreadCount) {
  const Layer layer(1200, 4, 20, 130, 8);
  layer.run(1);
  const std::vector<std::vector<float>> one = layer.results();
  for (const int threads : {2, 3, 8}) {
    const Layer again(1200, 4, 20, 130, 8);
    again.run(threads);
    EXPECT_EQ(one, again.results()) << threads << " threads";
  }
}

TEST(Combine, TakesEveryMixOfFloats) {
  // 1 and 2^-3 are exact in all three; one token with two slots of one row each
  const uint16_t one_bf16 = 0x3f80, eighth_f16 = 0x3000;
  const Tensor<int32_t> row_of_slot({1, 2}, {1, 0});
  const Tensor<int32_t> slot_of_row({2}, {1, 0});
  const Tensor<uint16_t> rows({2, 1}, {one_bf16, one_bf16}, AB_BFLOAT16);
  const Tensor<uint16_t> weights({1, 2}, {eighth_f16, eighth_f16}, AB_FLOAT16);
  Tensor<float> out({1, 1});
  const ab_combine_args args{sizeof(args), rows.view(), row_of_slot.view(), weights.view(), out.view(), nullptr};
  EXPECT_OK(call(ab_combine, ab_combine_workspace, args));
  EXPECT_EQ(out[0], 0.25f);

  const Tensor<float> d_out({1, 1}, std::vector<float>{4.0f});
  Tensor<uint16_t> d_rows({2, 1}, AB_FLOAT16);
  Tensor<uint16_t> d_weights({1, 2}, AB_BFLOAT16);
  const ab_combine_backward_args backward{sizeof(backward),   d_out.view(),   rows.view(),   row_of_slot.view(),
                                          slot_of_row.view(), weights.view(), d_rows.view(), d_weights.view()};
  EXPECT_OK(call(ab_combine_backward, {}, backward));
  EXPECT_EQ(d_rows.values(), (std::vector<uint16_t>{0x3800, 0x3800}));     // 0.5
  EXPECT_EQ(d_weights.values(), (std::vector<uint16_t>{0x4080, 0x4080}));  // 4
}

TEST(Dispatch, TakesElementsOfEverySize) {
  const Tensor<int32_t> row_of_slot({2, 1}, {1, 0});
  const Tensor<int32_t> slot_of_row({3}, {1, 0, -1});
  const auto check = [&]<class T>(T, int32_t dtype) {
    const Tensor<T> x({2, 1}, {T{1}, T{3}}, dtype);
    Tensor<T> rows({3, 1}, dtype);
    const ab_dispatch_args args{sizeof(args), x.view(), row_of_slot.view(), slot_of_row.view(), nullptr, rows.view()};
    EXPECT_OK(call(ab_dispatch, {}, args));
    EXPECT_EQ(rows.values(), (std::vector<T>{3, 1, 0}));
  };
  check(uint8_t{}, AB_BOOL);
  check(uint8_t{}, AB_UINT8);
  check(int16_t{}, AB_INT16);
  check(int32_t{}, AB_INT32);
  check(int64_t{}, AB_INT64);
  check(uint16_t{}, AB_FLOAT16);
  check(uint16_t{}, AB_BFLOAT16);
}

TEST(Dispatch, WithWeightsIsTheGradientOfCombine) {
  const Layer layer(50, 3, 6, 40, 8);
  EXPECT_OK(call(ab_combine_backward, {}, layer.combine_backward()));
  ab_dispatch_args args = layer.dispatch();
  args.x = layer.d_out.view();
  args.weights = layer.weights.view();
  EXPECT_OK(call(ab_dispatch, {}, args));
  EXPECT_EQ(layer.rows.values(), layer.d_rows.values());
}

TEST(Dispatch, KeepsNaNInItsRow) {
  Layer layer(20, 2, 3, 8, 8);
  layer.x[5 * layer.D] = NAN;
  EXPECT_OK(call(ab_dispatch, {}, layer.dispatch()));
  int64_t count = 0;
  for (const float value : layer.rows.values()) count += std::isnan(value);
  int64_t expected = 0;
  for (int64_t k = 0; k < layer.K; ++k) expected += layer.plan.row_of_slot[5 * layer.K + k] >= 0;
  EXPECT_EQ(count, expected);
}

// Whatever the maps hold: no access out of bounds (the sanitizer build), every output written, the same on every run.
TEST(Dispatch, StandsGarbageInTheMaps) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    Layer layer(4000, 4, 5, 41);  // large enough for threads
    fill(&layer.plan.row_of_slot, garbage(layer.T * layer.K, layer.R, seed));
    fill(&layer.plan.slot_of_row, garbage(layer.R, layer.T * layer.K, seed + 100));
    const auto refresh = [&] {
      for (Tensor<float>* result : {&layer.rows, &layer.out, &layer.d_rows, &layer.d_weights}) {
        std::fill(result->values().begin(), result->values().end(), NAN);
      }
    };
    layer.run(1);
    const std::vector<std::vector<float>> once = layer.results();
    for (const std::vector<float>& result : once) {
      for (const float value : result) EXPECT_FALSE(std::isnan(value));
    }
    refresh();
    layer.run(4);
    EXPECT_EQ(once, layer.results());
  }
}

TEST(RowIdMap, StandsGarbage) {
  const int64_t T = 10000;  // large enough for threads
  const int64_t E = 20;
  const int64_t R = 7000;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const Tensor<int32_t> row_id_map({T, 2 * E + 1}, garbage(T * (2 * E + 1), E, seed));
    const Tensor<int32_t> padding({E}, garbage(E, R, seed));
    std::vector<std::vector<int32_t>> first;
    for (const int threads : {1, 2, 4}) {
      Tensor<int32_t> row_of_slot({T, E});
      Tensor<int32_t> slot_of_row({R});
      const ab_expand_row_id_map_args args{sizeof(args), row_id_map.view(), padding.view(), row_of_slot.view(),
                                           slot_of_row.view()};
      EXPECT_OK(call(ab_expand_row_id_map, {}, args, threads));
      std::vector<int32_t> last(static_cast<size_t>(R), -1);  // of the slots that name a row
      for (int64_t slot = 0; slot < T * E; ++slot) {
        ASSERT_TRUE(row_of_slot[slot] >= -1 && row_of_slot[slot] < R);
        if (row_of_slot[slot] >= 0) last[static_cast<size_t>(row_of_slot[slot])] = static_cast<int32_t>(slot);
      }
      EXPECT_EQ(slot_of_row.values(), last);
      if (first.empty()) first = {row_of_slot.values(), slot_of_row.values()};
      EXPECT_EQ(first, (std::vector<std::vector<int32_t>>{row_of_slot.values(), slot_of_row.values()}));
    }
  }
}

TEST(SortChunks, PutsChunksInOrderAndBack) {
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

TEST(SortChunks, PermutesWhateverTheSizesAndIndices) {
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

TEST(Plan, TakesABitMapAsAByteMap) {
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

TEST(Plan, RefusesWhatDoesNotFit) {
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
  refused("dropped: got int32 (4) [3]", [](ab_plan_args* args) { args->dropped = args->group_sizes; });
  refused("experts: got bool (1) [4, 3], expected int32 [T, K]",
          [&](ab_plan_args* args) { args->experts = routed.view(); });
  Tensor<int32_t> row_id_map({4, 7});
  refused("row_id_map: got one with experts", [&](ab_plan_args* args) { args->row_id_map = row_id_map.view(); });
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

TEST(Combine, RefusesWhatDoesNotFit) {
  const Layer layer(4, 2, 3, 5);
  const Tensor<int32_t> integers({4, 5}, indices(20, 0, 9, 1));
  const Tensor<float> other({3, 3}, normal(9, 1));

  ab_dispatch_args dispatch = layer.dispatch();
  dispatch.weights = other.view();
  EXPECT_REFUSED(call(ab_dispatch, {}, dispatch), AB_INVALID_ARGUMENT, "weights: got float32 (8) [3, 3]");
  dispatch = layer.dispatch();
  dispatch.x = integers.view();
  EXPECT_REFUSED(call(ab_dispatch, {}, dispatch), AB_INVALID_ARGUMENT, "rows: got float32 (8) [8, 5], expected int32");
  dispatch.weights = layer.weights.view();
  EXPECT_REFUSED(call(ab_dispatch, {}, dispatch), AB_INVALID_ARGUMENT, "x: got int32");
  dispatch = layer.dispatch();
  dispatch.row_of_slot = integers.view();
  dispatch.x = other.view();
  EXPECT_REFUSED(call(ab_dispatch, {}, dispatch), AB_INVALID_ARGUMENT, "row_of_slot: got int32 (4) [4, 5], expected");

  ab_combine_args combine = layer.combine();
  combine.out = other.view();
  EXPECT_REFUSED(call(ab_combine, ab_combine_workspace, combine), AB_INVALID_ARGUMENT,
                 "out: got float32 (8) [3, 3], expected float16 or bfloat16 or float32 [T=4, D=5]");
  combine = layer.combine();
  combine.rows = integers.view();
  EXPECT_REFUSED(call(ab_combine, ab_combine_workspace, combine), AB_INVALID_ARGUMENT, "rows: got int32");
  combine = layer.combine();
  combine.addend = other.view();
  EXPECT_REFUSED(call(ab_combine, ab_combine_workspace, combine), AB_INVALID_ARGUMENT,
                 "addend: got float32 (8) [3, 3], expected float16 or bfloat16 or float32 [T=4, D=5]");
  combine.addend = integers.view();
  EXPECT_REFUSED(call(ab_combine, ab_combine_workspace, combine), AB_INVALID_ARGUMENT,
                 "addend: got int32 (4) [4, 5], expected float16");
  combine = layer.combine();
  EXPECT_REFUSED(ab_combine(&combine, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");

  ab_combine_backward_args backward = layer.combine_backward();
  backward.rows = nullptr;
  EXPECT_REFUSED(call(ab_combine_backward, {}, backward), AB_INVALID_ARGUMENT, "rows: got NULL, expected the rows");
  backward.d_weights = nullptr;
  EXPECT_OK(call(ab_combine_backward, {}, backward));
  backward.d_rows = other.view();
  EXPECT_REFUSED(call(ab_combine_backward, {}, backward), AB_INVALID_ARGUMENT, "d_rows: got float32 (8) [3, 3]");
  backward = layer.combine_backward();
  backward.d_rows = nullptr;
  EXPECT_OK(call(ab_combine_backward, {}, backward));

  ab_sort_chunks_args sort{};
  sort.size = sizeof(sort);
  sort.inverse = 2;
  EXPECT_REFUSED(call(ab_sort_chunks, ab_sort_chunks_workspace, sort), AB_INVALID_ARGUMENT, "inverse: got 2");
  ab_expand_row_id_map_args expand{sizeof(expand), integers.view(), nullptr, layer.plan.row_of_slot.view(),
                                   layer.plan.slot_of_row.view()};
  EXPECT_OK(call(ab_expand_row_id_map, {}, expand));  // [4, 2E+1] with E = 2
  expand.row_id_map = layer.plan.row_of_slot.view();
  EXPECT_REFUSED(call(ab_expand_row_id_map, {}, expand), AB_INVALID_ARGUMENT, "row_id_map: got int32 (4) [4, 2]");
}

}  // namespace
}  // namespace anabranch::testing
