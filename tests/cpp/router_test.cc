#include "anabranch/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "float_tensor.h"
#include "support.h"

namespace anabranch::testing {
namespace {

constexpr double kBound = 2e-6;  // rounding error of float32, relative to a tensor's norm

std::vector<float> random(int64_t size, unsigned seed, float scale = 2.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = normal(generator);
  return values;
}

struct Options {
  int32_t score_function = AB_SOFTMAX;
  int32_t normalize = 1;
  int32_t num_groups = 0;
  int32_t group_topk = 0;
  float scaling_factor = 1.0f;
};

ab_router_forward_args forward_args(const Tensor<float>& logits, int32_t topk, const Options& options = {}) {
  ab_router_forward_args args{};
  args.size = sizeof(args);
  args.topk = topk;
  args.score_function = options.score_function;
  args.normalize = options.normalize;
  args.num_groups = options.num_groups;
  args.group_topk = options.group_topk;
  args.scaling_factor = options.scaling_factor;
  args.logits = logits.view();
  return args;
}

ab_router_backward_args backward_args(const Tensor<float>& logits, int32_t topk, const Options& options = {}) {
  ab_router_backward_args args{};
  args.size = sizeof(args);
  args.topk = topk;
  args.score_function = options.score_function;
  args.normalize = options.normalize;
  args.scaling_factor = options.scaling_factor;
  args.logits = logits.view();
  return args;
}

ab_status forward(const ab_router_forward_args& args, int threads = 0) {
  return call(ab_router_forward, ab_router_forward_workspace, args, threads);
}

ab_status backward(const ab_router_backward_args& args, int threads = 0) {
  return call(ab_router_backward, ab_router_backward_workspace, args, threads);
}

// All outputs of compact routing for logits [T, E].
struct Compact {
  Compact(int64_t T, int64_t E, int64_t K) : weights({T, K}), experts({T, K}), counts({E}), score_sum({E}), lse({T}) {}

  void request(ab_router_forward_args* args) const {
    args->weights = weights.view();
    args->experts = experts.view();
    args->tokens_per_expert = counts.view();
    args->score_sum = score_sum.view();
    args->lse = lse.view();
  }

  Tensor<float> weights;
  Tensor<int32_t> experts;
  Tensor<int32_t> counts;
  Tensor<float> score_sum;
  Tensor<float> lse;
};

double score(int32_t function, double z, double lse) {
  if (function == AB_SOFTMAX) return std::exp(z - lse);
  if (function == AB_SIGMOID) return 1.0 / (1.0 + std::exp(-z));
  return std::sqrt(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
}

double logsumexp(const float* z, int64_t E) {
  const double top = *std::max_element(z, z + E);
  double sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += std::exp(z[e] - top);
  return top + std::log(sum);
}

// The top K of a row; ties go to the smaller index.
std::vector<int32_t> best(const float* z, int64_t E, int64_t K) {
  std::vector<int32_t> order(static_cast<size_t>(E));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [z](int32_t a, int32_t b) { return z[a] > z[b]; });
  order.resize(static_cast<size_t>(K));
  return order;
}

template <class T>
void expect_close(const std::vector<T>& got, const std::vector<double>& want, const char* name) {
  ASSERT_EQ(got.size(), want.size()) << name;
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += want[i] * want[i];
  }
  EXPECT_LE(std::sqrt(error), kBound * std::sqrt(norm)) << name;
}

TEST(RouterForward, MatchesTheFormula) {
  for (const int32_t function : {AB_SOFTMAX, AB_SIGMOID, AB_SQRTSOFTPLUS}) {
    for (const int32_t normalize : {0, 1}) {
      for (const auto& [T, E, K] :
           {std::array<int64_t, 3>{300, 40, 6}, {1, 1, 1}, {9, 5, 5}, {17, 200, 37}, {8, 512, 200}}) {
        const Tensor<float> logits({T, E}, random(T * E, 1));
        const Compact got(T, E, K);
        const Options options{.score_function = function, .normalize = normalize, .scaling_factor = 2.5f};
        ab_router_forward_args args = forward_args(logits, static_cast<int32_t>(K), options);
        got.request(&args);
        EXPECT_OK(forward(args));

        std::vector<double> weights, lse, score_sum(static_cast<size_t>(E));
        std::vector<int32_t> experts, counts(static_cast<size_t>(E));
        for (int64_t t = 0; t < T; ++t) {
          const float* z = logits.values().data() + t * E;
          lse.push_back(logsumexp(z, E));
          double all = function == AB_SOFTMAX ? 0 : 1e-20;
          for (int64_t e = 0; e < E; ++e) all += score(function, z[e], lse.back());
          for (int64_t e = 0; e < E; ++e) score_sum[static_cast<size_t>(e)] += score(function, z[e], lse.back()) / all;
          double sum = 0;
          const std::vector<int32_t> selected = best(z, E, K);
          for (const int32_t e : selected) sum += score(function, z[e], lse.back());
          for (const int32_t e : selected) {
            experts.push_back(e);
            ++counts[static_cast<size_t>(e)];
            weights.push_back(2.5 * score(function, z[e], lse.back()) / (normalize ? sum : 1.0));
          }
        }
        EXPECT_EQ(got.experts.values(), experts);
        EXPECT_EQ(got.counts.values(), counts);
        expect_close(got.weights.values(), weights, "weights");
        expect_close(got.lse.values(), lse, "lse");
        expect_close(got.score_sum.values(), score_sum, "score_sum");
      }
    }
  }
}

// The gradient of loss = <cotangents, outputs>, against finite differences of the library's own forward pass.
TEST(RouterBackward, MatchesFiniteDifferences) {
  const int64_t T = 5, E = 11, K = 3;
  const std::vector<float> z = random(T * E, 1, 1.0f);
  const Tensor<float> d_weights({T, K}, random(T * K, 2));
  const Tensor<float> d_score_sum({E}, random(E, 3));
  const Tensor<float> d_lse({T}, random(T, 4));
  for (const int32_t function : {AB_SOFTMAX, AB_SIGMOID, AB_SQRTSOFTPLUS}) {
    for (const int32_t normalize : {0, 1}) {
      const Options options{.score_function = function, .normalize = normalize, .scaling_factor = 1.5f};
      const auto loss = [&](const std::vector<float>& at, const Tensor<int32_t>& experts) {
        const Tensor<float> logits({T, E}, at);
        const Compact got(T, E, K);
        ab_router_forward_args args = forward_args(logits, K, options);
        got.request(&args);
        args.forced_experts = experts.view();
        EXPECT_OK(forward(args));
        double sum = 0;
        for (int64_t i = 0; i < T * K; ++i) sum += static_cast<double>(got.weights[i]) * d_weights[i];
        for (int64_t i = 0; i < E; ++i) sum += static_cast<double>(got.score_sum[i]) * d_score_sum[i];
        for (int64_t i = 0; i < T; ++i) sum += static_cast<double>(got.lse[i]) * d_lse[i];
        return sum;
      };
      const Tensor<float> logits({T, E}, z);
      const Compact got(T, E, K);
      ab_router_forward_args args = forward_args(logits, K, options);
      got.request(&args);
      EXPECT_OK(forward(args));

      Tensor<float> d_logits({T, E});
      ab_router_backward_args back = backward_args(logits, K, options);
      back.experts = got.experts.view();
      back.lse = got.lse.view();
      back.d_weights = d_weights.view();
      back.d_score_sum = d_score_sum.view();
      back.d_lse = d_lse.view();
      back.d_logits = d_logits.view();
      EXPECT_OK(backward(back));
      Tensor<float> without_lse({T, E});
      back.lse = nullptr;
      back.d_logits = without_lse.view();
      EXPECT_OK(backward(back));

      for (int64_t i = 0; i < T * E; ++i) {
        std::vector<float> up = z;
        std::vector<float> down = z;
        up[static_cast<size_t>(i)] += 1e-2f;
        down[static_cast<size_t>(i)] -= 1e-2f;
        const double step = static_cast<double>(up[static_cast<size_t>(i)]) - down[static_cast<size_t>(i)];
        const double want = (loss(up, got.experts) - loss(down, got.experts)) / step;
        EXPECT_NEAR(d_logits[i], want, 2e-3) << "function " << function << " normalize " << normalize << " at " << i;
        EXPECT_NEAR(without_lse[i], d_logits[i], 1e-5);
      }
    }
  }
}

TEST(RouterForward, HasTheSameBitsForEveryThreadCountAndSetOfOutputs) {
  const int64_t T = 1000, E = 96, K = 8;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> bias({E}, random(E, 2, 0.1f));
  const Options options{.score_function = AB_SIGMOID, .num_groups = 8, .group_topk = 4};
  const Compact one(T, E, K);
  ab_router_forward_args args = forward_args(logits, K, options);
  args.expert_bias = bias.view();
  one.request(&args);
  EXPECT_OK(forward(args, 1));
  for (const int threads : {1, 2, 3, 8}) {
    const Compact many(T, E, K);
    many.request(&args);
    EXPECT_OK(forward(args, threads));
    EXPECT_EQ(many.weights.values(), one.weights.values());
    EXPECT_EQ(many.experts.values(), one.experts.values());
    EXPECT_EQ(many.counts.values(), one.counts.values());
    EXPECT_EQ(many.score_sum.values(), one.score_sum.values());
    EXPECT_EQ(many.lse.values(), one.lse.values());
  }

  const Tensor<float> probs({T, E});
  const Tensor<float> aux_scores({T, E});
  const Tensor<uint8_t> bytes({T, E}, AB_BOOL);
  args.probs = probs.view();
  args.aux_scores = aux_scores.view();
  args.routing_map = bytes.view();
  args.weights = args.experts = args.tokens_per_expert = args.score_sum = args.lse = nullptr;
  EXPECT_OK(forward(args));
  std::vector<float> want(static_cast<size_t>(T * E));
  std::vector<uint8_t> want_bytes(want.size());
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t k = 0; k < K; ++k) {
      const auto at = static_cast<size_t>(t * E + one.experts[t * K + k]);
      want[at] = one.weights[t * K + k];
      want_bytes[at] = 1;
    }
  }
  EXPECT_EQ(probs.values(), want);
  EXPECT_EQ(bytes.values(), want_bytes);
  for (int64_t t = 0; t < T; ++t) {
    double sum = 0;
    for (int64_t e = 0; e < E; ++e) sum += aux_scores[t * E + e];
    EXPECT_NEAR(sum, 1.0, 1e-6);
  }
  args.probs = args.aux_scores = nullptr;
  for (const int32_t dtype : {AB_INT16, AB_INT32, AB_INT64}) {
    const Tensor<int64_t> wide({T, K});
    ab_tensor view = *wide.view();
    view.dtype = dtype;
    args.routing_map = &view;
    EXPECT_OK(forward(args));
    for (int64_t i = 0; i < T * K; ++i) {
      const void* data = wide.values().data();
      const int64_t got = dtype == AB_INT16   ? static_cast<const int16_t*>(data)[i]
                          : dtype == AB_INT32 ? static_cast<const int32_t*>(data)[i]
                                              : static_cast<const int64_t*>(data)[i];
      ASSERT_EQ(got, one.experts[i]);
    }
  }
}

TEST(RouterBackward, RoundsGradientsOfFloat32LogitsOnce) {
  const int64_t T = 37, E = 24, K = 4;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> d_weights({T, K}, random(T * K, 2));
  const Tensor<float> d_score_sum({E}, random(E, 3));
  Tensor<int32_t> experts({T, K});
  ab_router_forward_args args = forward_args(logits, K);
  args.experts = experts.view();
  EXPECT_OK(forward(args));
  const auto compute = [&](FloatTensor& d_logits) {
    ab_router_backward_args back = backward_args(logits, K, {});
    back.experts = experts.view();
    back.d_weights = d_weights.view();
    back.d_score_sum = d_score_sum.view();
    back.d_logits = d_logits.view();
    EXPECT_OK(backward(back));
  };
  FloatTensor exact({T, E}, AB_FLOAT32);
  compute(exact);
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    FloatTensor got({T, E}, dtype);
    compute(got);
    FloatTensor want({T, E}, dtype);
    for (int64_t i = 0; i < T * E; ++i) {
      want.set(i, exact.get(i));
      ASSERT_EQ(got.get(i), want.get(i));
    }
  }
}

TEST(RouterBackward, HasTheSameBitsForEveryThreadCount) {
  const int64_t T = 1000, E = 96, K = 8, B = 5;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> d_weights({T, K}, random(T * K, 2));
  const Tensor<float> d_score_sum({B, E}, random(B * E, 3));
  Tensor<int32_t> experts({T, K});
  ab_router_forward_args args = forward_args(logits, K);
  args.experts = experts.view();
  EXPECT_OK(forward(args));
  Tensor<float> one({T, E});
  ab_router_backward_args back = backward_args(logits, K, {.normalize = 0});
  back.experts = experts.view();
  back.d_weights = d_weights.view();
  back.d_score_sum = d_score_sum.view();
  back.d_logits = one.view();
  EXPECT_OK(backward(back, 1));
  for (const int threads : {2, 3, 8}) {
    Tensor<float> many({T, E});
    back.d_logits = many.view();
    EXPECT_OK(backward(back, threads));
    EXPECT_EQ(many.values(), one.values());
  }
}

// Passes the selection to the dense backward pass in every form that the forward pass can return.
TEST(RouterBackward, AcceptsTheSelectionInEveryForm) {
  const int64_t T = 77, E = 21, K = 4;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> d_probs({T, E}, random(T * E, 2));
  const Tensor<int32_t> experts({T, K});
  const Tensor<uint8_t> bytes({T, E}, AB_BOOL), bits({T, 3});
  const Tensor<int16_t> int16({T, K});
  const Tensor<int64_t> int64({T, K});
  Tensor<uint8_t> mask({T}, AB_BOOL);
  for (int64_t t = 0; t < T; ++t) mask[t] = t % 5 != 2;
  for (const ab_tensor* map : {bytes.view(), bits.view(), int16.view(), int64.view()}) {
    ab_router_forward_args args = forward_args(logits, K);
    args.token_mask = mask.view();
    args.experts = experts.view();
    args.routing_map = map;
    EXPECT_OK(forward(args));
  }
  for (const int32_t function : {AB_SOFTMAX, AB_SIGMOID}) {
    ab_router_backward_args args = backward_args(logits, K, {.score_function = function, .normalize = 1});
    args.token_mask = mask.view();
    args.d_probs = d_probs.view();
    const auto gradient = [&](const ab_tensor* indices, const ab_tensor* map) {
      const Tensor<float> d_logits({T, E});
      args.experts = indices;
      args.routing_map = map;
      args.d_logits = d_logits.view();
      EXPECT_OK(backward(args));
      return d_logits.values();
    };
    const std::vector<float> want = gradient(experts.view(), nullptr);
    EXPECT_EQ(gradient(int16.view(), nullptr), want);
    EXPECT_EQ(gradient(int64.view(), nullptr), want);
    const std::vector<float> by_bytes = gradient(nullptr, bytes.view());
    EXPECT_EQ(gradient(nullptr, bits.view()), by_bytes);
    expect_close(by_bytes, {want.begin(), want.end()},
                 "d_logits by a map");  // a map lists the experts in another order
  }
}

TEST(RouterBackward, ReadsTopkExpertsOfAMapAndSkipsInvalidIndices) {
  const int64_t E = 6, K = 2;
  const Tensor<float> logits({3, E}, random(3 * E, 1));
  const Tensor<float> d_probs({3, E}, random(3 * E, 2));
  const Tensor<uint8_t> map({3, E}, {0, 1, 0, 9, 1, 0, /**/ 0, 0, 0, 0, 0, 1, /**/ 0, 0, 0, 0, 0, 0}, AB_BOOL);
  const Tensor<int64_t> invalid({3, K}, {1, 3, (int64_t{1} << 32) + 1, 5, std::numeric_limits<int64_t>::min(), E});
  std::vector<std::vector<float>> gradients;
  for (const bool by_map : {false, true}) {
    const Tensor<float> d_logits({3, E});
    ab_router_backward_args args = backward_args(logits, K, {.score_function = AB_SIGMOID, .normalize = 0});
    args.experts = by_map ? nullptr : invalid.view();
    args.routing_map = by_map ? map.view() : nullptr;
    args.d_probs = d_probs.view();
    args.d_logits = d_logits.view();
    EXPECT_OK(backward(args));
    gradients.push_back(d_logits.values());
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  for (int64_t i = 0; i < 3 * E; ++i) {
    const bool selected = i == 1 || i == 3 || i == E + 5;
    EXPECT_EQ(gradients[0][static_cast<size_t>(i)] != 0.0f, selected) << i;
  }
}

// Allocates tensors at their exact size, so AddressSanitizer detects any access outside them.
TEST(Router, WritesExactlyTheOutputsForInvalidIndices) {
  for (const auto& [T, E, K] : {std::array<int64_t, 3>{0, 4, 2}, {1, 3, 2}, {13, 19, 5}, {130, 40, 40}}) {
    const Tensor<float> logits({T, E}, random(T * E, 1));
    Tensor<int32_t> forced({T, K});
    const std::vector<int32_t> invalid{0,
                                       -1,
                                       std::numeric_limits<int32_t>::max(),
                                       std::numeric_limits<int32_t>::min(),
                                       2,
                                       static_cast<int32_t>(E),
                                       static_cast<int32_t>(E) - 1,
                                       2};
    for (int64_t i = 0; i < forced.size(); ++i) forced[i] = invalid[static_cast<size_t>(i) % invalid.size()];
    Tensor<uint8_t> mask({T}, AB_BOOL);
    for (int64_t t = 0; t < T; ++t) mask[t] = t % 3 != 1;
    const Compact got(T, E, K);
    ab_router_forward_args args = forward_args(logits, static_cast<int32_t>(K));
    args.forced_experts = forced.view();
    args.token_mask = mask.view();
    got.request(&args);
    EXPECT_OK(forward(args));
    int64_t counted = 0;
    for (int64_t i = 0; i < T * K; ++i) {
      const bool valid = mask[i / K] != 0 && forced[i] >= 0 && forced[i] < E;
      EXPECT_EQ(got.experts[i], valid ? forced[i] : -1);
      EXPECT_EQ(got.weights[i] != 0.0f, valid);
      counted += valid;
    }
    EXPECT_EQ(std::accumulate(got.counts.values().begin(), got.counts.values().end(), int64_t{0}), counted);
    for (const float value : got.score_sum.values()) EXPECT_TRUE(std::isfinite(value));
    for (int64_t t = 0; t < T; ++t) EXPECT_EQ(got.lse[t] == 0.0f, mask[t] == 0);

    // The backward pass accepts the same invalid indices.
    const Tensor<float> d_weights({T, K}, random(T * K, 2));
    Tensor<float> d_logits({T, E});
    ab_router_backward_args back = backward_args(logits, static_cast<int32_t>(K));
    back.experts = forced.view();
    back.token_mask = mask.view();
    back.d_weights = d_weights.view();
    back.d_logits = d_logits.view();
    EXPECT_OK(backward(back));
    for (int64_t i = 0; i < T * E; ++i) {
      EXPECT_TRUE(std::isfinite(d_logits[i]));
      EXPECT_TRUE(mask[i / E] != 0 || d_logits[i] == 0.0f);
    }
  }
}

TEST(RouterForward, ReturnsStatisticsPerSequence) {
  const int64_t B = 3, S = 140, E = 10, K = 2;
  const Tensor<float> logits({B * S, E}, random(B * S * E, 1));
  const Tensor<int32_t> counts({B, E});
  const Tensor<float> score_sum({B, E});
  ab_router_forward_args args = forward_args(logits, K);
  args.tokens_per_expert = counts.view();
  args.score_sum = score_sum.view();
  EXPECT_OK(forward(args));
  for (int64_t b = 0; b < B; ++b) {
    const Tensor<float> part({S, E}, {logits.values().begin() + b * S * E, logits.values().begin() + (b + 1) * S * E});
    const Tensor<int32_t> part_counts({E});
    const Tensor<float> part_sum({E});
    ab_router_forward_args one = forward_args(part, K);
    one.tokens_per_expert = part_counts.view();
    one.score_sum = part_sum.view();
    EXPECT_OK(forward(one));
    for (int64_t e = 0; e < E; ++e) {
      EXPECT_EQ(counts[b * E + e], part_counts[e]);
      EXPECT_EQ(score_sum[b * E + e], part_sum[e]);
    }
  }
}

// The bin width is a power of two and the scores are float32 values, so nothing is rounded.
TEST(RouterForward, CountsThresholdMinusScoreInBins) {
  const int64_t T = 300, E = 7, K = 3, bins = 16;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> bias({E}, random(E, 2, 0.25f));
  Tensor<uint8_t> mask({T}, AB_BOOL);
  for (int64_t t = 0; t < T; ++t) mask[t] = t % 7 != 3;
  const Tensor<float> bounds({2}, {-0.25f, 0.25f});
  for (const int32_t function : {AB_SOFTMAX, AB_SIGMOID, AB_SQRTSOFTPLUS}) {
    const Tensor<int32_t> histogram({E, bins});
    ab_router_forward_args args = forward_args(logits, K, {.score_function = function});
    args.expert_bias = bias.view();
    args.token_mask = mask.view();
    args.qb_bin_bounds = bounds.view();
    args.qb_histogram = histogram.view();
    EXPECT_OK(forward(args, 1));
    std::vector<int32_t> want(static_cast<size_t>(E * bins));
    for (int64_t t = 0; t < T; ++t) {
      if (mask[t] == 0) continue;
      const float* z = logits.values().data() + t * E;
      const double lse = logsumexp(z, E);
      std::vector<double> keys;
      for (int64_t e = 0; e < E; ++e) keys.push_back(score(function, z[e], lse) + bias[e]);
      std::sort(keys.begin(), keys.end(), std::greater<>());
      for (int64_t e = 0; e < E; ++e) {
        const double place = (keys[K] - score(function, z[e], lse) + 0.25) * bins / 0.5;
        ++want[static_cast<size_t>(e * bins + std::clamp<int64_t>(static_cast<int64_t>(std::floor(place)), 0, 15))];
      }
    }
    EXPECT_EQ(histogram.values(), want);
    for (const int threads : {2, 3, 8}) {
      const Tensor<int32_t> many({E, bins});
      args.qb_histogram = many.view();
      EXPECT_OK(forward(args, threads));
      EXPECT_EQ(many.values(), want);
    }
  }
}

TEST(RouterForward, RefusesBadArguments) {
  const int64_t T = 6, E = 8;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> weights({T, 2});
  const auto with = [&](auto change) {
    ab_router_forward_args args = forward_args(logits, 2);
    args.weights = weights.view();
    change(args);
    return forward(args);
  };
  using Args = ab_router_forward_args&;
  const Tensor<float> bias({E}), short_bias({E - 1}), flat({T * E}), probs({T, E}), sums({E}), many_sums({4, E});
  const Tensor<int32_t> integers({T, 2}), one_slot({T, 1}), counts({E}), three_counts({3, E}), integer_logits({T, E});
  const Tensor<uint8_t> mask({T}, AB_BOOL), long_mask({T + 1}, AB_BOOL), bytes({T, E}, AB_BOOL), bits({T, 1});
  const Tensor<uint16_t> half_probs({T, E});
  const float nan = std::numeric_limits<float>::quiet_NaN();

  EXPECT_OK(with([](Args) {}));
  EXPECT_REFUSED(ab_router_forward(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_router_forward_args: got NULL");
  EXPECT_REFUSED(with([](Args a) { a.size = 8; }), AB_INVALID_ARGUMENT, "ab_router_forward_args: got size 8");
  EXPECT_REFUSED(with([](Args a) { a.logits = nullptr; }), AB_INVALID_ARGUMENT, "logits: got NULL");
  EXPECT_REFUSED(with([&](Args a) { a.logits = flat.view(); }), AB_INVALID_ARGUMENT, "logits: got float32 (8) [48]");
  EXPECT_REFUSED(with([&](Args a) { a.logits = integer_logits.view(); }), AB_INVALID_ARGUMENT, "logits: got int32");
  EXPECT_REFUSED(with([](Args a) { a.topk = 0; }), AB_INVALID_ARGUMENT, "topk: got 0, expected 1 <= topk <= 8");
  EXPECT_REFUSED(with([](Args a) { a.topk = 9; }), AB_INVALID_ARGUMENT, "topk: got 9");
  EXPECT_REFUSED(with([](Args a) { a.score_function = 3; }), AB_INVALID_ARGUMENT, "score_function: got 3");
  EXPECT_REFUSED(with([](Args a) { a.normalize = 2; }), AB_INVALID_ARGUMENT, "normalize: got 2");
  EXPECT_REFUSED(with([&](Args a) { a.scaling_factor = nan; }), AB_INVALID_ARGUMENT, "scaling_factor: got nan");
  EXPECT_REFUSED(with([](Args a) { a.scaling_factor = INFINITY; }), AB_INVALID_ARGUMENT, "scaling_factor: got inf");
  EXPECT_REFUSED(with([](Args a) { a.num_groups = 3, a.group_topk = 1; }), AB_INVALID_ARGUMENT, "num_groups: got 3");
  EXPECT_REFUSED(with([](Args a) { a.group_topk = 1; }), AB_INVALID_ARGUMENT, "num_groups: got 0");
  EXPECT_REFUSED(with([](Args a) { a.num_groups = -4, a.group_topk = 1; }), AB_INVALID_ARGUMENT, "num_groups: got -4");
  EXPECT_REFUSED(with([](Args a) { a.num_groups = 4; }), AB_INVALID_ARGUMENT, "group_topk: got 0");
  EXPECT_REFUSED(with([](Args a) { a.num_groups = 1, a.group_topk = 2; }), AB_INVALID_ARGUMENT, "group_topk: got 2");
  EXPECT_REFUSED(with([](Args a) { a.num_groups = 8, a.group_topk = 1; }), AB_INVALID_ARGUMENT, "group_topk: got 1");
  EXPECT_REFUSED(with([](Args a) { a.group_score_topk = 1; }), AB_INVALID_ARGUMENT,
                 "group_score_topk: got 1 without groups");
  const auto in_groups = [&](int32_t group_topk, int32_t group_score_topk) {
    return with([=](Args a) { a.num_groups = 4, a.group_topk = group_topk, a.group_score_topk = group_score_topk; });
  };
  EXPECT_OK(in_groups(2, 1));
  EXPECT_OK(in_groups(1, 2));
  EXPECT_REFUSED(in_groups(2, 3), AB_INVALID_ARGUMENT, "group_score_topk: got 3, expected 1 to the 2 experts");
  EXPECT_REFUSED(in_groups(2, -1), AB_INVALID_ARGUMENT, "group_score_topk: got -1");
  EXPECT_REFUSED(in_groups(5, 1), AB_INVALID_ARGUMENT, "group_topk: got 5");
  EXPECT_REFUSED(
      with([](Args a) { a.num_groups = 8, a.group_topk = 1, a.group_score_topk = 1; }), AB_INVALID_ARGUMENT,
      "group_topk: got 1, expected 1 <= group_topk <= num_groups 8, and groups of 1 experts that hold topk 2");
  EXPECT_REFUSED(with([&](Args a) { a.expert_bias = short_bias.view(); }), AB_INVALID_ARGUMENT, "expert_bias: got");
  EXPECT_REFUSED(with([&](Args a) { a.token_mask = long_mask.view(); }), AB_INVALID_ARGUMENT, "token_mask: got");
  EXPECT_REFUSED(with([&](Args a) { a.token_mask = counts.view(); }), AB_INVALID_ARGUMENT, "token_mask: got int32");
  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = one_slot.view(); }), AB_INVALID_ARGUMENT, "forced_experts: got");
  EXPECT_REFUSED(with([&](Args a) { a.weights = integers.view(); }), AB_INVALID_ARGUMENT, "weights: got int32");
  EXPECT_REFUSED(with([&](Args a) { a.experts = one_slot.view(); }), AB_INVALID_ARGUMENT, "experts: got int32");
  EXPECT_REFUSED(with([&](Args a) { a.lse = sums.view(); }), AB_INVALID_ARGUMENT, "lse: got");
  EXPECT_REFUSED(with([&](Args a) { a.probs = half_probs.view(); }), AB_INVALID_ARGUMENT, "probs: got bfloat16");
  EXPECT_REFUSED(with([&](Args a) { a.aux_scores = half_probs.view(); }), AB_INVALID_ARGUMENT,
                 "aux_scores: got bfloat16");
  EXPECT_REFUSED(with([&](Args a) { a.routing_map = probs.view(); }), AB_INVALID_ARGUMENT, "routing_map: got float32");
  EXPECT_REFUSED(with([&](Args a) { a.routing_map = one_slot.view(); }), AB_INVALID_ARGUMENT, "routing_map: got int32");
  EXPECT_OK(with([&](Args a) { a.routing_map = bits.view(); }));
  EXPECT_REFUSED(with([&](Args a) { a.score_sum = many_sums.view(); }), AB_INVALID_ARGUMENT,
                 "score_sum: got 4 sequences");
  EXPECT_REFUSED(with([&](Args a) { a.tokens_per_expert = sums.view(); }), AB_INVALID_ARGUMENT,
                 "tokens_per_expert: got");
  EXPECT_REFUSED(with([&](Args a) { a.tokens_per_expert = three_counts.view(), a.score_sum = sums.view(); }),
                 AB_INVALID_ARGUMENT, "score_sum: got 1 sequences, expected the 3");

  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = integers.view(), a.expert_bias = bias.view(); }),
                 AB_INVALID_ARGUMENT, "expert_bias: got one together with forced_experts");
  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = integers.view(), a.num_groups = 4, a.group_topk = 2; }),
                 AB_INVALID_ARGUMENT, "num_groups: got one together with forced_experts");
  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = integers.view(), a.probs = probs.view(); }), AB_INVALID_ARGUMENT,
                 "probs: got one together with forced_experts");
  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = integers.view(), a.routing_map = bytes.view(); }),
                 AB_INVALID_ARGUMENT, "routing_map: got one together with forced_experts");
  EXPECT_REFUSED(with([&](Args a) { a.forced_experts = integers.view(), a.aux_scores = probs.view(); }),
                 AB_INVALID_ARGUMENT, "aux_scores: got one together with forced_experts");
  EXPECT_REFUSED(with([&](Args a) { a.weights = nullptr, a.score_sum = sums.view(), a.expert_bias = bias.view(); }),
                 AB_INVALID_ARGUMENT, "expert_bias: got one in a call without an output of the selection");
  EXPECT_REFUSED(with([&](Args a) { a.weights = nullptr, a.experts = integers.view(), a.scaling_factor = 2.0f; }),
                 AB_INVALID_ARGUMENT, "scaling_factor: got 2 in a call without weights or probs");

  const Tensor<float> bounds({2}), three({3});
  const Tensor<int32_t> histogram({E, 5}), no_bins({E, 0}), few({E - 1, 5});
  const auto balancing = [&](auto change) {
    return with([&](Args a) {
      a.expert_bias = bias.view(), a.qb_bin_bounds = bounds.view(), a.qb_histogram = histogram.view();
      change(a);
    });
  };
  EXPECT_OK(balancing([](Args) {}));
  EXPECT_REFUSED(balancing([](Args a) { a.expert_bias = nullptr; }), AB_INVALID_ARGUMENT,
                 "expert_bias: got NULL together with qb_histogram");
  EXPECT_REFUSED(balancing([](Args a) { a.qb_bin_bounds = nullptr; }), AB_INVALID_ARGUMENT, "qb_bin_bounds: got NULL");
  EXPECT_REFUSED(balancing([](Args a) { a.qb_histogram = nullptr; }), AB_INVALID_ARGUMENT, "qb_histogram: got NULL");
  EXPECT_REFUSED(balancing([&](Args a) { a.qb_bin_bounds = three.view(); }), AB_INVALID_ARGUMENT,
                 "qb_bin_bounds: got float32 (8) [3]");
  EXPECT_REFUSED(balancing([&](Args a) { a.qb_histogram = no_bins.view(); }), AB_INVALID_ARGUMENT,
                 "qb_histogram: got 0 bins");
  EXPECT_REFUSED(balancing([&](Args a) { a.qb_histogram = few.view(); }), AB_INVALID_ARGUMENT,
                 "qb_histogram: got int32 (4) [7, 5]");
  EXPECT_REFUSED(balancing([&](Args a) { a.num_groups = 4, a.group_topk = 2; }), AB_INVALID_ARGUMENT,
                 "num_groups: got one together with qb_histogram");
  EXPECT_REFUSED(balancing([&](Args a) { a.topk = 8, a.weights = nullptr, a.lse = nullptr; }), AB_INVALID_ARGUMENT,
                 "topk: got 8 together with qb_histogram, expected fewer than the 8 experts");

  const Tensor<float> wide({1, 32769});
  const Tensor<int16_t> narrow({1, 2});
  ab_router_forward_args args = forward_args(wide, 2);
  args.routing_map = narrow.view();
  EXPECT_REFUSED(forward(args), AB_INVALID_ARGUMENT, "routing_map: got int16 indices for 32769 experts");
  args = forward_args(logits, 2);
  args.weights = weights.view();
  EXPECT_REFUSED(ab_router_forward(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  // T K exceeds int32. Only the shape claims that size; the memory is never read.
  Tensor<float> huge({1, 8});
  huge.mutable_view()->shape[0] = int64_t{1} << 28;
  args = forward_args(huge, 8);
  EXPECT_REFUSED(forward(args), AB_INVALID_ARGUMENT, "logits: got 268435456 tokens with topk 8");
}

TEST(RouterBackward, RefusesBadArguments) {
  const int64_t T = 6, E = 8;
  const Tensor<float> logits({T, E}, random(T * E, 1));
  const Tensor<float> d_logits({T, E}), d_weights({T, 2}), dense({T, E}), sums({E}), tokens({T});
  Tensor<int32_t> experts({T, 2}), one_slot({T, 1});
  const Tensor<uint16_t> half({T, E});
  const auto with = [&](auto change) {
    ab_router_backward_args args = backward_args(logits, 2);
    args.experts = experts.view();
    args.d_weights = d_weights.view();
    args.d_logits = d_logits.view();
    change(args);
    return backward(args);
  };
  using Args = ab_router_backward_args&;
  EXPECT_OK(with([](Args) {}));
  EXPECT_REFUSED(ab_router_backward(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_router_backward_args: got NULL");
  EXPECT_REFUSED(with([](Args a) { a.size = 0; }), AB_INVALID_ARGUMENT, "ab_router_backward_args: got size 0");
  EXPECT_REFUSED(with([](Args a) { a.topk = 3; }), AB_INVALID_ARGUMENT, "experts: got int32 (4) [6, 2]");
  EXPECT_REFUSED(with([](Args a) { a.score_function = -1; }), AB_INVALID_ARGUMENT, "score_function: got -1");
  EXPECT_REFUSED(with([](Args a) { a.scaling_factor = INFINITY; }), AB_INVALID_ARGUMENT, "scaling_factor: got inf");
  EXPECT_REFUSED(with([](Args a) { a.experts = nullptr; }), AB_INVALID_ARGUMENT,
                 "experts: got NULL together with d_weights");
  EXPECT_REFUSED(with([&](Args a) { a.d_weights = dense.view(); }), AB_INVALID_ARGUMENT, "d_weights: got");
  EXPECT_REFUSED(with([&](Args a) { a.d_probs = dense.view(); }), AB_INVALID_ARGUMENT,
                 "d_probs: got one together with");
  EXPECT_REFUSED(with([&](Args a) { a.d_score_sum = sums.view(), a.d_aux_scores = dense.view(); }), AB_INVALID_ARGUMENT,
                 "d_aux_scores: got one together with d_score_sum");
  EXPECT_REFUSED(with([](Args a) { a.d_weights = nullptr; }), AB_INVALID_ARGUMENT,
                 "experts: got one in a call without");
  EXPECT_REFUSED(with([](Args a) { a.d_weights = nullptr, a.experts = nullptr, a.scaling_factor = 3; }),
                 AB_INVALID_ARGUMENT, "scaling_factor: got 3 in a call without");
  EXPECT_REFUSED(with([&](Args a) { a.score_function = AB_SIGMOID, a.lse = tokens.view(); }), AB_INVALID_ARGUMENT,
                 "lse: got one in a call without a softmax");
  const Tensor<uint8_t> bytes({T, E}, AB_BOOL), bits({T, 1}), short_bytes({T, E - 1}, AB_BOOL);
  EXPECT_REFUSED(with([&](Args a) { a.routing_map = bytes.view(); }), AB_INVALID_ARGUMENT,
                 "routing_map: got one together with experts");
  EXPECT_REFUSED(with([&](Args a) { a.experts = nullptr, a.routing_map = bytes.view(); }), AB_INVALID_ARGUMENT,
                 "routing_map: got one in a call without d_probs");
  const auto dense_with = [&](const ab_tensor* map) {
    return with(
        [&](Args a) { a.experts = nullptr, a.d_weights = nullptr, a.d_probs = dense.view(), a.routing_map = map; });
  };
  EXPECT_OK(dense_with(bytes.view()));
  EXPECT_OK(dense_with(bits.view()));
  EXPECT_REFUSED(dense_with(nullptr), AB_INVALID_ARGUMENT, "experts: got NULL together with d_probs");
  EXPECT_REFUSED(dense_with(short_bytes.view()), AB_INVALID_ARGUMENT, "routing_map: got bool (1) [6, 7]");
  EXPECT_REFUSED(dense_with(experts.view()), AB_INVALID_ARGUMENT, "routing_map: got int32");
  EXPECT_REFUSED(with([&](Args a) { a.d_weights = nullptr, a.experts = nullptr, a.routing_map = bits.view(); }),
                 AB_INVALID_ARGUMENT, "routing_map: got one in a call without d_probs");
  EXPECT_REFUSED(with([](Args a) { a.d_logits = nullptr; }), AB_INVALID_ARGUMENT, "d_logits: got NULL");
  EXPECT_REFUSED(with([&](Args a) { a.logits = half.view(); }), AB_INVALID_ARGUMENT, "d_logits: got float32");
}

}  // namespace
}  // namespace anabranch::testing
