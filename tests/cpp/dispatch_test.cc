#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch_operands.h"

namespace anabranch::testing {
namespace {

void fill(Tensor<int32_t>* tensor, const std::vector<int32_t>& values) {
  ASSERT_EQ(tensor->values().size(), values.size());
  std::copy(values.begin(), values.end(), tensor->values().begin());
}

// The plan, operands and results of one dispatch and combine in float32.
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

TEST(Dispatch, CopiesTokensToTheirRowsAndClearsPadding) {
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

TEST(Combine, AndItsGradientsMatchTheFormulas) {
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

TEST(Combine, AcceptsEmptyTensors) {
  for (const auto& [T, D] : {std::pair<int64_t, int64_t>{0, 8}, {5, 0}, {0, 0}}) {
    const Layer layer(T, 2, 3, D, 8);
    layer.run(0);
    EXPECT_EQ(layer.d_weights.values(), std::vector<float>(static_cast<size_t>(T * 2), 0.0f));
    for (const float value : layer.rows.values()) EXPECT_EQ(value, 0.0f);
    for (const float value : layer.d_rows.values()) EXPECT_EQ(value, 0.0f);
  }
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

TEST(Combine, AcceptsEveryMixOfDtypes) {
  // One token with two assignments. 1 and 2^-3 are exact in all three dtypes.
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

TEST(Dispatch, AcceptsElementsOfEverySize) {
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

// With garbage in the gather and scatter indices, no access is out of bounds (checked by the sanitizer build), every
// output is written, and every run gives the same bits.
TEST(Dispatch, ToleratesGarbageIndices) {
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

TEST(RowIdMap, ToleratesGarbage) {
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
      std::vector<int32_t> last(static_cast<size_t>(R), -1);  // the last slot that names each row
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

TEST(Combine, RefusesBadArguments) {
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
  EXPECT_REFUSED(call(ab_combine_backward, {}, backward), AB_INVALID_ARGUMENT,
                 "rows: got NULL together with d_weights");
  backward.d_weights = nullptr;
  EXPECT_OK(call(ab_combine_backward, {}, backward));
  backward.d_rows = other.view();
  EXPECT_REFUSED(call(ab_combine_backward, {}, backward), AB_INVALID_ARGUMENT, "d_rows: got float32 (8) [3, 3]");
  backward = layer.combine_backward();
  backward.d_rows = nullptr;
  EXPECT_OK(call(ab_combine_backward, {}, backward));

  ab_expand_row_id_map_args expand{sizeof(expand), integers.view(), nullptr, layer.plan.row_of_slot.view(),
                                   layer.plan.slot_of_row.view()};
  EXPECT_OK(call(ab_expand_row_id_map, {}, expand));  // [4, 2E+1] with E = 2
  expand.row_id_map = layer.plan.row_of_slot.view();
  EXPECT_REFUSED(call(ab_expand_row_id_map, {}, expand), AB_INVALID_ARGUMENT, "row_id_map: got int32 (4) [4, 2]");
}

}  // namespace
}  // namespace anabranch::testing
