#include "anabranch/balance.h"

#include <gtest/gtest.h>

#include <cmath>

#include "float_tensor.h"
#include "support.h"

namespace anabranch::testing {
namespace {

std::vector<float> ramp(int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 2654435761u) % 1000) / 999.0f;
  return values;
}

ab_status score_sum(const Tensor<float>& scores, const Tensor<float>& sum, int threads = 0) {
  ab_score_sum_args args{};
  args.size = sizeof(args);
  args.scores = scores.view();
  args.score_sum = sum.view();
  return call(ab_score_sum, ab_score_sum_workspace, args, threads);
}

TEST(ScoreSum, AddsColumnsOfEverySequence) {
  for (const int64_t T : {0, 1, 7, 600}) {
    for (const int64_t B : {int64_t{1}, T}) {
      if (B == 0 || T % B != 0) continue;
      const int64_t E = 5;
      const Tensor<float> scores({T, E}, ramp(T * E));
      Tensor<float> sum({B, E});
      EXPECT_OK(score_sum(scores, sum));
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t e = 0; e < E; ++e) {
          double want = 0;
          for (int64_t t = b * (T / B); t < (b + 1) * (T / B); ++t) want += static_cast<double>(scores[t * E + e]);
          EXPECT_NEAR(sum[b * E + e], want, 1e-6 * want) << "T " << T << " B " << B << " e " << e;
        }
      }
    }
  }
}

TEST(ScoreSum, HasTheSameBitsForEveryThreadCount) {
  const Tensor<float> scores({1000, 13}, ramp(13000));
  Tensor<float> one({13});
  EXPECT_OK(score_sum(scores, one, 1));
  for (const int threads : {2, 3, 8}) {
    Tensor<float> many({13});
    EXPECT_OK(score_sum(scores, many, threads));
    EXPECT_EQ(one.values(), many.values());
  }
}

TEST(ScoreSum, RefusesBadArguments) {
  const Tensor<float> scores({6, 4}, ramp(24));
  EXPECT_REFUSED(score_sum(scores, Tensor<float>({5})), AB_INVALID_ARGUMENT,
                 "score_sum: got float32 (8) [5], expected float32 [E=4]");
  EXPECT_REFUSED(score_sum(scores, Tensor<float>({4, 4})), AB_INVALID_ARGUMENT,
                 "score_sum: got 4 sequences for 6 tokens");
  EXPECT_REFUSED(ab_score_sum(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_score_sum_args: got NULL");
  Tensor<float> sum({4});
  ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
  EXPECT_REFUSED(ab_score_sum(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes, expected at least 16");
  const int64_t strides[] = {8, 2};
  Tensor<float> strided({6, 4}, ramp(24));
  strided.mutable_view()->strides = strides;
  EXPECT_REFUSED(score_sum(strided, sum), AB_INVALID_ARGUMENT, "scores: got strides");
}

TEST(LoadBalanceLoss, MatchesTheFormula) {
  const Tensor<float> sums({2, 2}, {1.0f, 2.0f, 3.0f, 4.0f});
  const Tensor<int32_t> counts({2, 2}, {3, 1, 2, 2});
  const Tensor<int32_t> tokens({2}, {4, 0});
  Tensor<float> loss(std::vector<int64_t>{});
  Tensor<float> gradient({2, 2});
  ab_load_balance_loss_args args{sizeof(args),  2,           0.5f,           sums.view(), counts.view(),
                                 tokens.view(), loss.view(), gradient.view()};
  EXPECT_OK(ab_load_balance_loss(&args, nullptr));
  const float factor = 0.5f * 2 / (2 * 16.0f * 2);  // coeff E / (K N^2 B); the second sequence has no token
  EXPECT_FLOAT_EQ(loss[0], factor * (1 * 3 + 2 * 1));
  EXPECT_EQ(gradient.values(), (std::vector<float>{factor * 3, factor * 1, 0, 0}));
}

// Small integers, which are exact in every dtype.
struct CountTensors {
  Tensor<uint8_t> uint8;
  Tensor<int16_t> int16;
  Tensor<int32_t> int32;
  Tensor<int64_t> int64;
  FloatTensor bfloat16, float16, float32;

  CountTensors(const std::vector<int64_t>& shape, const std::vector<int32_t>& values)
      : uint8(shape),
        int16(shape),
        int32(shape),
        int64(shape),
        bfloat16(shape, AB_BFLOAT16),
        float16(shape, AB_FLOAT16),
        float32(shape, AB_FLOAT32) {
    for (int64_t i = 0; i < int32.size(); ++i) {
      const int32_t value = values[static_cast<size_t>(i)];
      uint8[i] = static_cast<uint8_t>(value);
      int16[i] = static_cast<int16_t>(value);
      int32[i] = value;
      int64[i] = value;
      for (FloatTensor* tensor : {&bfloat16, &float16, &float32}) tensor->set(i, static_cast<float>(value));
    }
  }
  std::vector<const ab_tensor*> views() const {
    return {uint8.view(), int16.view(), int32.view(), int64.view(), bfloat16.view(), float16.view(), float32.view()};
  }
};

TEST(LoadBalanceLoss, AcceptsCountsOfEveryDtype) {
  const Tensor<float> sums({2, 2}, {1.0f, 2.0f, 3.0f, 4.0f});
  const CountTensors counts({2, 2}, {3, 1, 2, 2});
  const Tensor<int64_t> tokens({2}, {4, int64_t{1} << 33});
  Tensor<float> first(std::vector<int64_t>{});
  for (const ab_tensor* view : counts.views()) {
    Tensor<float> loss(std::vector<int64_t>{});
    ab_load_balance_loss_args args{sizeof(args), 2, 0.5f, sums.view(), view, tokens.view(), loss.view(), nullptr};
    EXPECT_OK(ab_load_balance_loss(&args, nullptr));
    const double large = static_cast<double>(int64_t{1} << 33);
    EXPECT_FLOAT_EQ(loss[0], static_cast<float>(0.25 * (5.0 / 16.0 + 14.0 / (large * large))));
    if (view == counts.views()[0]) first[0] = loss[0];
    EXPECT_EQ(loss[0], first[0]);
  }
}

ab_status aux_loss(const ab_moe_aux_loss_args& args, int threads = 0) {
  return call(ab_moe_aux_loss, ab_moe_aux_loss_workspace, args, threads);
}

TEST(MoeAuxLoss, MatchesTheFormulaAndItsGradient) {
  for (const int64_t T : {0, 1, 7, 600}) {
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      const int64_t C = 10;
      const int32_t E = 5, K = 2;
      FloatTensor probs({T, C}, dtype);
      probs.fill_uniform(1);
      const CountTensors counts({C}, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3});
      const Tensor<int64_t> tokens(std::vector<int64_t>{}, std::vector<int64_t>{300});
      const Tensor<float> d_loss(std::vector<int64_t>{}, std::vector<float>{-1.5f});
      for (const bool counted : {false, true}) {
        for (const ab_tensor* view : counts.views()) {
          Tensor<float> loss(std::vector<int64_t>{});
          FloatTensor d_probs({T, C}, dtype);
          ab_moe_aux_loss_args args{};
          args.size = sizeof(args);
          args.topk = K;
          args.num_experts = E;
          args.coeff = 0.25f;
          args.probs = probs.view();
          args.tokens_per_expert = view;
          args.num_tokens = counted ? tokens.view() : nullptr;
          args.d_loss = d_loss.view();
          args.loss = loss.view();
          args.d_probs = d_probs.view();
          EXPECT_OK(aux_loss(args));
          const double N = counted ? 300.0 : static_cast<double>(T);
          const double factor = N > 0 ? 0.25 * E / (K * N * N) : 0.0;
          double want = 0.0;
          double terms = 0.0;
          for (int64_t i = 0; i < T * C; ++i) {
            const double term = factor * counts.int32[i % C] * static_cast<double>(probs.get(i));
            want += term;
            terms += std::abs(term);
            const double gradient = -1.5 * factor * counts.int32[i % C];
            ASSERT_NEAR(d_probs.get(i), gradient, rounding_of(dtype) * std::abs(gradient) + 0x1p-25);
          }
          EXPECT_NEAR(loss[0], want, 1e-6 * terms);

          // Request the gradient alone, without the loss.
          FloatTensor alone({T, C}, dtype);
          args.probs = args.loss = nullptr;
          args.d_probs = alone.view();
          EXPECT_OK(aux_loss(args));
          EXPECT_TRUE(alone.is(d_probs));
        }
      }
    }
  }
}

TEST(MoeAuxLoss, HasTheSameBitsForEveryThreadCount) {
  const Tensor<float> probs({1000, 13}, ramp(13000));
  const Tensor<int32_t> counts({13}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13});
  const Tensor<float> one(std::vector<int64_t>{}), d_one({1000, 13});
  ab_moe_aux_loss_args args{};
  args.size = sizeof(args);
  args.topk = 1;
  args.coeff = 1.0f;
  args.probs = probs.view();
  args.tokens_per_expert = counts.view();
  args.loss = one.view();
  args.d_probs = d_one.view();
  EXPECT_OK(aux_loss(args, 1));
  for (const int threads : {2, 3, 8}) {
    const Tensor<float> many(std::vector<int64_t>{}), d_many({1000, 13});
    args.loss = many.view();
    args.d_probs = d_many.view();
    EXPECT_OK(aux_loss(args, threads));
    EXPECT_EQ(many.values(), one.values());
    EXPECT_EQ(d_many.values(), d_one.values());
  }
}

TEST(MoeAuxLoss, RefusesBadArguments) {
  const Tensor<float> probs({6, 4}, ramp(24)), loss(std::vector<int64_t>{}), d_probs({6, 4}), d_wide({6, 5}), one({1});
  const Tensor<int32_t> counts({4}), five({5}), tokens(std::vector<int64_t>{});
  const Tensor<uint8_t> flags({4}, AB_BOOL);
  const auto with = [&](auto change) {
    ab_moe_aux_loss_args args{};
    args.size = sizeof(args);
    args.topk = 2;
    args.coeff = 0.1f;
    args.probs = probs.view();
    args.tokens_per_expert = counts.view();
    args.loss = loss.view();
    args.d_probs = d_probs.view();
    change(args);
    return aux_loss(args);
  };
  using Args = ab_moe_aux_loss_args&;
  EXPECT_OK(with([](Args) {}));
  EXPECT_REFUSED(ab_moe_aux_loss(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_moe_aux_loss_args: got NULL");
  EXPECT_REFUSED(with([](Args a) { a.topk = 0; }), AB_INVALID_ARGUMENT, "topk: got 0");
  EXPECT_REFUSED(with([](Args a) { a.coeff = INFINITY; }), AB_INVALID_ARGUMENT, "coeff: got inf");
  EXPECT_REFUSED(with([](Args a) { a.num_experts = 3; }), AB_INVALID_ARGUMENT,
                 "num_experts: got 3, expected a divisor");
  EXPECT_REFUSED(with([](Args a) { a.num_experts = -1; }), AB_INVALID_ARGUMENT, "num_experts: got -1");
  EXPECT_REFUSED(with([](Args a) { a.probs = nullptr; }), AB_INVALID_ARGUMENT, "probs: got NULL");
  EXPECT_REFUSED(with([](Args a) { a.loss = a.d_probs = nullptr; }), AB_INVALID_ARGUMENT, "loss: got NULL");
  EXPECT_REFUSED(with([&](Args a) { a.probs = counts.view(); }), AB_INVALID_ARGUMENT, "probs: got int32");
  EXPECT_REFUSED(with([&](Args a) { a.tokens_per_expert = five.view(); }), AB_INVALID_ARGUMENT,
                 "tokens_per_expert: got int32 (4) [5]");
  EXPECT_REFUSED(with([&](Args a) { a.tokens_per_expert = flags.view(); }), AB_INVALID_ARGUMENT,
                 "tokens_per_expert: got bool");
  EXPECT_REFUSED(with([&](Args a) { a.num_tokens = loss.view(); }), AB_INVALID_ARGUMENT, "num_tokens: got float32");
  EXPECT_REFUSED(with([&](Args a) { a.d_loss = one.view(); }), AB_INVALID_ARGUMENT, "d_loss: got float32 (8) [1]");
  EXPECT_REFUSED(with([&](Args a) { a.d_loss = loss.view(), a.d_probs = nullptr; }), AB_INVALID_ARGUMENT,
                 "d_loss: got one in a call without d_probs");
  EXPECT_REFUSED(with([&](Args a) { a.d_probs = d_wide.view(); }), AB_INVALID_ARGUMENT,
                 "d_probs: got float32 (8) [6, 5]");
}

}  // namespace
}  // namespace anabranch::testing
