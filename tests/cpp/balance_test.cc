#include "anabranch/balance.h"

#include <gtest/gtest.h>

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

TEST(ScoreSum, RefusesWhatDoesNotFit) {
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

TEST(LoadBalanceLoss, IsTheFormula) {
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

}  // namespace
}  // namespace anabranch::testing
