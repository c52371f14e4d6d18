#include "anabranch/experts.h"
#include "anabranch/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "support.h"

namespace anabranch::testing {
namespace {

using Floats = Tensor<float>;
using Ints = Tensor<int32_t>;

// Deterministic values in [-1, 1).
std::vector<float> noise(int64_t size, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(size));
  uint32_t state = seed * 2654435761u + 12345u;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

Floats random(const std::vector<int64_t>& shape, uint32_t seed) {
  return {shape, noise(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()), seed)};
}

Tensor<uint16_t> random_bf16(const std::vector<int64_t>& shape, uint32_t seed) {
  const Floats values = random(shape, seed);
  std::vector<uint16_t> rounded;
  for (const float value : values.values()) rounded.push_back(from_float<BFloat16>(value).bits);
  return {shape, rounded};
}

// Rows of expert e: clipped as the header says.
std::vector<int64_t> offsets_of(const std::vector<int32_t>& sizes, int64_t R) {
  std::vector<int64_t> offsets{0};
  for (const int32_t size : sizes) offsets.push_back(offsets.back() + std::clamp<int64_t>(size, 0, R - offsets.back()));
  return offsets;
}

ab_status grouped_matmul(const Floats& x, const Floats& w, const Ints& sizes, const Floats& y, bool transpose,
                         int threads = 0) {
  const ab_grouped_matmul_args args{sizeof(args), transpose, x.view(), w.view(), sizes.view(), y.view()};
  return call(ab_grouped_matmul, ab_grouped_matmul_workspace, args, threads);
}

template <class T>
ab_status grouped_matmul_dw(const Tensor<T>& x, const Tensor<T>& d_y, const Ints& sizes, const Floats& d_w,
                            int32_t accumulate = 0, int threads = 0) {
  const ab_grouped_matmul_dw_args args{sizeof(args), accumulate, x.view(), d_y.view(), sizes.view(), d_w.view()};
  return call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, args, threads);
}

void expect_near(const Floats& got, const std::vector<double>& want, double bound, const std::string& name) {
  double error = 0;
  double norm = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double expected = want[static_cast<size_t>(i)];
    error += (got[i] - expected) * (got[i] - expected);
    norm += expected * expected;
    ASSERT_TRUE(expected != 0 || got[i] == 0) << name << " " << i << ": " << got[i] << " where zero is expected";
  }
  EXPECT_LE(std::sqrt(error), bound * std::sqrt(norm)) << name;
}

void check_grouped(const std::vector<int32_t>& group_sizes, int64_t R, int64_t D, int64_t N, bool transpose) {
  const auto E = static_cast<int64_t>(group_sizes.size());
  const Floats x = random({R, D}, 1);
  const Floats w = random(transpose ? std::vector<int64_t>{E, N, D} : std::vector<int64_t>{E, D, N}, 2);
  const Floats d_y = random({R, N}, 3);
  const Ints sizes({E}, group_sizes);
  const std::vector<int64_t> offsets = offsets_of(group_sizes, R);
  std::vector<double> y(static_cast<size_t>(R * N), 0.0);
  std::vector<double> d_w(static_cast<size_t>(E * D * N), 0.0);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
      for (int64_t d = 0; d < D; ++d) {
        for (int64_t n = 0; n < N; ++n) {
          const float weight = transpose ? w[(e * N + n) * D + d] : w[(e * D + d) * N + n];
          y[static_cast<size_t>(r * N + n)] += static_cast<double>(x[r * D + d]) * weight;
          d_w[static_cast<size_t>((e * D + d) * N + n)] += static_cast<double>(x[r * D + d]) * d_y[r * N + n];
        }
      }
    }
  }
  Floats got({R, N});
  EXPECT_OK(grouped_matmul(x, w, sizes, got, transpose));
  expect_near(got, y, 1e-6, "y");
  Floats gradient({E, D, N});
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, gradient));
  expect_near(gradient, d_w, 1e-6, "d_w");
}

TEST(GroupedMatmul, IsOneProductForEachExpert) {
  for (const bool transpose : {false, true}) {
    check_grouped({3, 0, 5, 1}, 9, 7, 5, transpose);
    check_grouped({3, 0, 5, 1}, 12, 7, 5, transpose);
    check_grouped({300, 1, 17}, 320, 33, 40, transpose);
    check_grouped({40}, 40, 600, 530, transpose);
    check_grouped({20, 20}, 40, 8, 1024, transpose);  // rows of w whole pages apart
    check_grouped({0, 0}, 4, 3, 2, transpose);
    check_grouped({2}, 0, 3, 2, transpose);
  }
}

TEST(GroupedMatmul, NoSizeReachesOutOfBounds) {
  for (const bool transpose : {false, true}) {
    check_grouped({-5, 3, INT32_MIN, 4, -1}, 6, 5, 3, transpose);
    check_grouped({2, INT32_MAX, INT32_MAX, 1}, 7, 5, 3, transpose);
    check_grouped({INT32_MAX, -1, INT32_MAX}, 300, 5, 3, transpose);
  }
}

// `sum` after accumulating onto `before` is `before` and the gradient, and all of `before` where an expert has no rows.
void expect_accumulated(const Floats& sum, const Floats& before, const Floats& gradient) {
  for (int64_t i = 0; i < sum.size(); ++i) {
    if (gradient[i] == 0.0f) {
      ASSERT_EQ(sum[i], before[i]) << i;
    } else {
      ASSERT_NEAR(sum[i], before[i] + gradient[i], 1e-6f * (64 + std::abs(gradient[i]))) << i;
    }
  }
}

template <class T>
void expect_accumulation(const Tensor<T>& x, const Tensor<T>& d_y, const std::vector<int32_t>& group_sizes) {
  const std::vector<int64_t> shape = {static_cast<int64_t>(group_sizes.size()), x.view()->shape[1],
                                      d_y.view()->shape[1]};
  const Ints sizes({shape[0]}, group_sizes);
  const Floats gradient(shape);
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, gradient));
  const Floats before = random(shape, 9);
  const Floats sum = random(shape, 9);
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, sum, 1));
  expect_accumulated(sum, before, gradient);
}

TEST(GroupedMatmul, GradientsAccumulate) {
  const std::vector<int32_t> sizes = {30, 0, 1500, 1, 0};  // sums of more terms than a block, experts without rows
  expect_accumulation(random({1540, 20}, 1), random({1540, 530}, 2), sizes);
  expect_accumulation(random_bf16({1540, 20}, 1), random_bf16({1540, 530}, 2), sizes);
}

TEST(GroupedMatmul, RefusesWhatDoesNotFit) {
  const Floats x = random({4, 3}, 1);
  const Floats w = random({2, 3, 5}, 2);
  const Ints sizes({2}, {2, 2});
  const Floats y({4, 5});
  EXPECT_OK(grouped_matmul(x, w, sizes, y, false));
  EXPECT_REFUSED(grouped_matmul(x, w, sizes, y, true), AB_INVALID_ARGUMENT,
                 "w: got float32 (8) [2, 3, 5], expected float32 [E=2, N, D=3]");
  EXPECT_REFUSED(grouped_matmul(x, w, Ints({3}, {1, 1, 1}), y, false), AB_INVALID_ARGUMENT,
                 "w: got float32 (8) [2, 3, 5], expected float32 [E=3, D=3, N]");
  EXPECT_REFUSED(grouped_matmul(x, w, sizes, Floats({4, 4}), false), AB_INVALID_ARGUMENT,
                 "y: got float32 (8) [4, 4], expected float32 [R=4, N=5]");
  EXPECT_REFUSED(ab_grouped_matmul(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_args: got NULL");
  EXPECT_REFUSED(ab_grouped_matmul_dw(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_dw_args: got NULL");
  ab_grouped_matmul_args args{sizeof(args), 2, x.view(), w.view(), sizes.view(), y.view()};
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "transpose_w: got 2, expected 0 or 1");
  args.transpose_w = 0;
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  args.size = 8;
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_args: got size 8");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({3, 5}), sizes, Floats({2, 3, 5})), AB_INVALID_ARGUMENT,
                 "d_y: got float32 (8) [3, 5], expected");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 5, 3})), AB_INVALID_ARGUMENT,
                 "d_w: got float32 (8) [2, 5, 3], expected");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 3, 5}), -1), AB_INVALID_ARGUMENT,
                 "accumulate: got -1, expected 0 or 1");
}

// A feed-forward network with every operand, T tokens of K slots each, tensors of element type T_.
template <class T_>
struct Network {
  int64_t T, K, R, E, D, P, F;
  Tensor<T_> x, w_in, b_in, w_out, b_out, d_out;
  Floats weights;
  Ints slot_of_row, group_sizes;
  // results
  Tensor<T_> y, h, dh, dx_rows, d_w_in, d_b_in, d_w_out, d_b_out;
  Floats d_weights;
  int32_t activation = AB_SILU;
  int32_t early = 0;

  static Tensor<T_> values(const std::vector<int64_t>& shape, uint32_t seed) {
    if constexpr (sizeof(T_) == 4) {
      return random(shape, seed);
    } else {
      return random_bf16(shape, seed);
    }
  }

  Network(int64_t tokens, int64_t topk, int64_t width, int64_t parts, int64_t hidden, const std::vector<int32_t>& sizes,
          const std::vector<int32_t>& slots)
      : T(tokens),
        K(topk),
        R(static_cast<int64_t>(slots.size())),
        E(static_cast<int64_t>(sizes.size())),
        D(width),
        P(parts),
        F(hidden),
        x(values({T, D}, 1)),
        w_in(values({E, D, P, F}, 2)),
        b_in(values({E, P, F}, 3)),
        w_out(values({E, F, D}, 4)),
        b_out(values({E, D}, 5)),
        d_out(values({T, D}, 6)),
        weights(random({T, K}, 7)),
        slot_of_row({R}, slots),
        group_sizes({E}, sizes),
        y({R, D}),
        h({R, P, F}),
        dh({R, P, F}),
        dx_rows({R, D}),
        d_w_in({E, D, P, F}),
        d_b_in({E, P, F}),
        d_w_out({E, F, D}),
        d_b_out({E, D}),
        d_weights({T, K}) {}

  ab_expert_ffn_forward_args forward_args() const {
    return {sizeof(ab_expert_ffn_forward_args),
            activation,
            early,
            static_cast<int32_t>(K),
            0,
            x.view(),
            slot_of_row.view(),
            group_sizes.view(),
            w_in.view(),
            b_in.view(),
            w_out.view(),
            b_out.view(),
            weights.view(),
            y.view(),
            h.view(),
            nullptr};
  }
  ab_expert_ffn_backward_args backward_args() const {
    return {sizeof(ab_expert_ffn_backward_args),
            activation,
            static_cast<int32_t>(K),
            0,
            0,
            x.view(),
            slot_of_row.view(),
            group_sizes.view(),
            w_in.view(),
            w_out.view(),
            b_out.view(),
            weights.view(),
            h.view(),
            d_out.view(),
            dh.view(),
            dx_rows.view(),
            d_w_in.view(),
            d_b_in.view(),
            d_w_out.view(),
            d_b_out.view(),
            d_weights.view(),
            nullptr};
  }
  ab_status forward(int threads = 0) const {
    return call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward_args(), threads);
  }
  ab_status backward(int threads = 0) const {
    return call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward_args(), threads);
  }
};

// Slots 0 .. count-1 in order.
std::vector<int32_t> slots_in_order(int64_t count) {
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

template <class T_>
void expect_same_results(const Network<T_>& a, const Network<T_>& b, const std::string& what) {
  EXPECT_EQ(a.y.values(), b.y.values()) << what;
  EXPECT_EQ(a.h.values(), b.h.values()) << what;
  EXPECT_EQ(a.dh.values(), b.dh.values()) << what;
  EXPECT_EQ(a.dx_rows.values(), b.dx_rows.values()) << what;
  EXPECT_EQ(a.d_w_in.values(), b.d_w_in.values()) << what;
  EXPECT_EQ(a.d_b_in.values(), b.d_b_in.values()) << what;
  EXPECT_EQ(a.d_w_out.values(), b.d_w_out.values()) << what;
  EXPECT_EQ(a.d_b_out.values(), b.d_b_out.values()) << what;
  EXPECT_EQ(a.d_weights.values(), b.d_weights.values()) << what;
}

template <class T_>
void expect_thread_independence(const std::vector<int32_t>& sizes, int64_t D, int64_t F) {
  const auto R = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  Network<T_> one(R / 2, 2, D, 2, F, sizes, slots_in_order(R));
  EXPECT_OK(one.forward(1));
  EXPECT_OK(one.backward(1));
  for (const int threads : {1, 2, 3, 8}) {
    Network<T_> many(R / 2, 2, D, 2, F, sizes, slots_in_order(R));
    EXPECT_OK(many.forward(threads));
    EXPECT_OK(many.backward(threads));
    expect_same_results(one, many, std::to_string(threads) + " threads");
  }
}

TEST(ExpertFfn, HasTheSameBitsForEveryThreadCount) {
  expect_thread_independence<float>({300, 0, 1, 99}, 72, 140);
  expect_thread_independence<float>({400}, 130, 300);
  expect_thread_independence<uint16_t>({300, 0, 1, 99}, 72, 140);
}

bool all_zero(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return value == 0.0f; });
}

// Entries of slot_of_row that name no slot are padding wherever they stand; the rest is as if they were not there.
TEST(ExpertFfn, SlotsThatNameNothingArePadding) {
  const int64_t T = 3;
  const int64_t K = 2;
  const std::vector<int32_t> slots = {4, -1, 0, INT32_MAX, INT32_MIN, 3, 6, -7, 5, 1, 9};
  Network<float> net(T, K, 5, 2, 4, {4, 0, 6}, slots);  // one row past the groups
  net.early = 1;
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  Network<float> dense(T, K, 5, 2, 4, {2, 0, 3}, {4, 0, 3, 5, 1});
  dense.early = 1;
  EXPECT_OK(dense.forward());
  EXPECT_OK(dense.backward());

  int64_t real = 0;
  for (int64_t r = 0; r < net.R; ++r) {
    const int32_t slot = slots[static_cast<size_t>(r)];
    if (slot < 0 || slot >= T * K || r >= 10) {
      EXPECT_TRUE(all_zero(&net.y[r * 5], 5)) << "y " << r;
      EXPECT_TRUE(all_zero(&net.h[r * 8], 8)) << "h " << r;
      EXPECT_TRUE(all_zero(&net.dh[r * 8], 8)) << "dh " << r;
      EXPECT_TRUE(all_zero(&net.dx_rows[r * 5], 5)) << "dx " << r;
      continue;
    }
    for (int64_t d = 0; d < 5; ++d) {
      EXPECT_NEAR(net.y[r * 5 + d], dense.y[real * 5 + d], 1e-5f) << "y " << r;
      EXPECT_NEAR(net.dx_rows[r * 5 + d], dense.dx_rows[real * 5 + d], 1e-5f) << "dx " << r;
    }
    ++real;
  }
  EXPECT_EQ(real, 5);
  for (int64_t i = 0; i < net.d_w_in.size(); ++i) EXPECT_NEAR(net.d_w_in[i], dense.d_w_in[i], 1e-5f);
  for (int64_t i = 0; i < net.d_w_out.size(); ++i) EXPECT_NEAR(net.d_w_out[i], dense.d_w_out[i], 1e-5f);
  for (int64_t i = 0; i < net.d_b_out.size(); ++i) EXPECT_NEAR(net.d_b_out[i], dense.d_b_out[i], 1e-5f);
  for (int64_t i = 0; i < net.d_weights.size(); ++i) EXPECT_NEAR(net.d_weights[i], dense.d_weights[i], 1e-5f);
  EXPECT_EQ(net.d_weights[2], 0.0f);  // slot 2 has no row
}

TEST(ExpertFfn, NoSizeReachesOutOfBounds) {
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{-3, INT32_MAX, INT32_MAX}, {INT32_MIN, 2, -1}, {5, INT32_MAX, 7}}) {
    Network<float> garbage(3, 2, 5, 1, 4, sizes, slots_in_order(6));
    EXPECT_OK(garbage.forward());
    EXPECT_OK(garbage.backward());
    const std::vector<int64_t> offsets = offsets_of(sizes, 6);
    std::vector<int32_t> clipped;
    for (size_t e = 0; e < 3; ++e) clipped.push_back(static_cast<int32_t>(offsets[e + 1] - offsets[e]));
    Network<float> clean(3, 2, 5, 1, 4, clipped, slots_in_order(6));
    EXPECT_OK(clean.forward());
    EXPECT_OK(clean.backward());
    expect_same_results(garbage, clean, "clipped sizes");
  }
}

TEST(ExpertFfn, NanInAWeightStaysOutOfPaddingAndOtherExperts) {
  Network<float> net(2, 1, 3, 2, 4, {2, 1}, {0, -1, 1});
  net.w_out[0] = NAN;
  net.w_in[0] = NAN;
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  EXPECT_TRUE(std::isnan(net.y[0]));
  EXPECT_TRUE(all_zero(&net.y[3], 3));
  EXPECT_TRUE(all_zero(&net.dx_rows[3], 3));
  for (int64_t d = 0; d < 3; ++d) EXPECT_TRUE(std::isfinite(net.y[6 + d]));
  for (int64_t i = 0; i < 3 * 8; ++i) EXPECT_TRUE(std::isfinite(net.d_w_in[3 * 8 + i]));
}

TEST(ExpertFfn, DhTakesOverTheMemoryOfH) {
  Network<float> apart(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  EXPECT_OK(apart.forward());
  EXPECT_OK(apart.backward());
  Network<float> together(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  EXPECT_OK(together.forward());
  ab_expert_ffn_backward_args args = together.backward_args();
  args.dh = together.h.view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  EXPECT_EQ(together.h.values(), apart.dh.values());
  EXPECT_EQ(together.dx_rows.values(), apart.dx_rows.values());
  EXPECT_EQ(together.d_w_in.values(), apart.d_w_in.values());
  EXPECT_EQ(together.d_w_out.values(), apart.d_w_out.values());
  EXPECT_EQ(together.d_weights.values(), apart.d_weights.values());
}

TEST(ExpertFfn, TwoCallsAreOne) {
  using A = ab_expert_ffn_backward_args;
  Network<float> one(70, 2, 33, 2, 150, {60, 0, 70}, slots_in_order(140));
  EXPECT_OK(one.forward());
  EXPECT_OK(one.backward());
  Network<float> two(70, 2, 33, 2, 150, {60, 0, 70}, slots_in_order(140));
  EXPECT_OK(two.forward());
  const Floats weighted_a({140, 150});
  A first = two.backward_args();
  A second = first;
  for (const auto later : {&A::dx_rows, &A::d_w_in, &A::d_b_in, &A::d_w_out, &A::d_b_out}) first.*later = nullptr;
  first.weighted_a = second.weighted_a = weighted_a.view();
  second.h = second.d_weights = nullptr;
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, first));
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, second));
  expect_same_results(two, one, "in two calls");
  for (int64_t i = 130 * 150; i < 140 * 150; ++i) ASSERT_EQ(weighted_a[i], 0.0f) << "past the groups";

  const auto refused = [&](auto change, const char* text) {
    A args = second;
    change(args);
    EXPECT_REFUSED(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args), AB_INVALID_ARGUMENT, text);
  };
  refused([](A& args) { args.dh = nullptr; }, "h: got NULL, expected [R, P, F], or dh that an earlier call gave");
  refused([](A& args) { args.weighted_a = nullptr; },
          "h: got NULL, expected [R, P, F], or weighted_a that an earlier call gave");
  refused([&](A& args) { args.d_weights = two.d_weights.view(); }, "d_weights: got a tensor, expected NULL without h");
  refused([&](A& args) { args.weighted_a = two.h.view(); }, "weighted_a: got float32 (8) [140, 2, 150], expected");
  refused([](A& args) { args.dx_rows = args.d_w_in = args.d_b_in = nullptr; },
          "dh: got a tensor, expected NULL without h, or something that follows from it");
  refused([](A& args) { args.d_w_out = nullptr; }, "weighted_a: got a tensor, expected NULL without h, or d_w_out");
  refused([](A& args) { args.skip_rest = 1; }, "skip_rest: got 1, expected 0 without h");
  refused([](A& args) { args.skip_rest = 2; }, "skip_rest: got 2, expected 0 or 1");
}

TEST(ExpertFfn, EachOutputIsTheSameAlone) {
  Network<float> all(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  EXPECT_OK(all.forward());
  EXPECT_OK(all.backward());
  Network<float> one(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  ab_expert_ffn_forward_args forward = one.forward_args();
  forward.h = nullptr;
  EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
  EXPECT_EQ(one.y.values(), all.y.values());
  EXPECT_OK(one.forward());
  const auto alone = [&](const ab_tensor* ab_expert_ffn_backward_args::* wanted) {
    ab_expert_ffn_backward_args args = one.backward_args();
    const ab_tensor* view = args.*wanted;
    args.dh = args.dx_rows = args.d_w_in = args.d_b_in = args.d_w_out = args.d_b_out = args.d_weights = nullptr;
    args.*wanted = view;
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  };
  alone(&ab_expert_ffn_backward_args::dh);
  alone(&ab_expert_ffn_backward_args::dx_rows);
  alone(&ab_expert_ffn_backward_args::d_w_in);
  alone(&ab_expert_ffn_backward_args::d_b_in);
  alone(&ab_expert_ffn_backward_args::d_w_out);
  alone(&ab_expert_ffn_backward_args::d_b_out);
  alone(&ab_expert_ffn_backward_args::d_weights);
  expect_same_results(one, all, "each output alone");
}

// Gradients of weights may be float32 whatever the other tensors are, and then accumulate.
template <class T_>
void expect_accumulated_weights() {
  const Network<T_> net(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  EXPECT_OK(net.forward());
  const std::vector<int64_t> in = {3, 6, 2, 5};
  const std::vector<int64_t> out = {3, 5, 6};
  const Floats gradients[2] = {Floats(in), Floats(out)};
  const Floats before[2] = {random(in, 8), random(out, 9)};
  const Floats sums[2] = {random(in, 8), random(out, 9)};
  ab_expert_ffn_backward_args args = net.backward_args();
  args.d_w_in = gradients[0].view();
  args.d_w_out = gradients[1].view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  args.accumulate = 1;
  args.d_w_in = sums[0].view();
  args.d_w_out = sums[1].view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  for (const int i : {0, 1}) expect_accumulated(sums[i], before[i], gradients[i]);
}

TEST(ExpertFfn, GradientsOfWeightsAccumulate) {
  expect_accumulated_weights<float>();
  expect_accumulated_weights<uint16_t>();
}

TEST(ExpertFfn, ExpertsWithoutRowsGetZeroGradients) {
  Network<float> net(2, 1, 3, 2, 4, {0, 2, 0}, {0, 1});
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  for (const int64_t e : {0, 2}) {
    EXPECT_TRUE(all_zero(&net.d_w_in[e * 24], 24));
    EXPECT_TRUE(all_zero(&net.d_b_in[e * 8], 8));
    EXPECT_TRUE(all_zero(&net.d_w_out[e * 12], 12));
    EXPECT_TRUE(all_zero(&net.d_b_out[e * 3], 3));
  }
  EXPECT_FALSE(all_zero(&net.d_w_in[24], 24));
}

TEST(ExpertFfn, EmptySizesAreOrdinary) {
  for (const int64_t R : {0, 3}) {
    for (const int64_t F : {0, 4}) {
      Network<float> net(R, 1, 3, 2, F, {2, 1}, slots_in_order(R));
      EXPECT_OK(net.forward());
      EXPECT_OK(net.backward());
      EXPECT_TRUE(R > 0 || all_zero(net.d_w_out.values().data(), net.d_w_out.size()));
      if (F > 0) continue;
      for (int64_t i = 0; i < net.y.size(); ++i) {
        EXPECT_EQ(net.y[i], net.weights[i / 3] * net.b_out[i / 6 * 3 + i % 3]);  // row r: expert r / 2
      }
      for (int64_t r = 0; r < R; ++r) {  // <d_y, b_out>
        float product = 0;
        for (int64_t d = 0; d < 3; ++d) product += net.d_out[r * 3 + d] * net.b_out[r / 2 * 3 + d];
        EXPECT_NEAR(net.d_weights[r], product, 1e-6f);
      }
    }
  }
}

TEST(ExpertFfn, SlotsWithoutAnyRowGetZeroGradients) {
  Network<float> net(3, 2, 4, 2, 5, {1, 0}, {});
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  EXPECT_TRUE(all_zero(net.d_weights.values().data(), net.d_weights.size()));
}

TEST(ExpertFfn, RefusesWhatDoesNotFit) {
  Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const auto refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args forward = net.forward_args();
    change(forward);
    EXPECT_REFUSED(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward), AB_INVALID_ARGUMENT, text);
    ab_expert_ffn_backward_args backward = net.backward_args();
    change(backward);
    EXPECT_REFUSED(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward), AB_INVALID_ARGUMENT, text);
  };
  const Floats odd({1, 1});
  const Tensor<uint16_t> bf16({2, 3, 2, 4});
  const Floats three_parts({2, 3, 3, 4});
  refused([](auto& args) { args.size = 1; }, "_args: got size 1, expected");
  refused([](auto& args) { args.activation = 4; }, "activation: got 4, expected 0 (silu)");
  refused([](auto& args) { args.activation = -1; }, "activation: got -1, expected 0 (silu)");
  refused([](auto& args) { args.topk = 0; }, "topk: got 0, expected at least 1");
  refused([](auto& args) { args.slot_of_row = nullptr; }, "topk: got 2, expected 0 without slot_of_row");
  refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  refused([](auto& args) { args.group_sizes = nullptr; }, "group_sizes: got NULL, expected int32 [E]");
  refused([&](auto& args) { args.w_in = bf16.view(); }, "w_in: got bfloat16 (7) [2, 3, 2, 4], expected float32");
  refused([&](auto& args) { args.w_in = three_parts.view(); }, "w_in: got 3 parts, expected 2 (gate, up) or 1");
  refused([&](auto& args) { args.w_out = odd.view(); },
          "w_out: got float32 (8) [1, 1], expected float32 [E=2, F=4, D=3]");
  refused([&](auto& args) { args.b_out = odd.view(); }, "b_out: got float32 (8) [1, 1], expected float32 [E=2, D=3]");
  refused([&](auto& args) { args.weights = odd.view(); }, "weights: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.h = odd.view(); }, "h: got float32 (8) [1, 1], expected float32 [R=4, P=2, F=4]");

  ab_expert_ffn_forward_args forward = net.forward_args();
  forward.weights = nullptr;
  forward.weight_early = 1;
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT,
                 "weight_early: got 1, expected 0, or 1 together with weights");
  forward = net.forward_args();
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  forward.y = odd.view();
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "y: got float32 (8) [1, 1], expected");
  ab_expert_ffn_backward_args backward = net.backward_args();
  backward.d_out = odd.view();
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, "d_out: got float32 (8) [1, 1]");
  for (const auto member :
       {&ab_expert_ffn_backward_args::dh, &ab_expert_ffn_backward_args::dx_rows, &ab_expert_ffn_backward_args::d_w_in,
        &ab_expert_ffn_backward_args::d_b_in, &ab_expert_ffn_backward_args::d_w_out,
        &ab_expert_ffn_backward_args::d_b_out, &ab_expert_ffn_backward_args::d_weights}) {
    backward = net.backward_args();
    backward.*member = odd.view();
    EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, ": got float32 (8) [1, 1]");
  }
  backward = net.backward_args();
  backward.accumulate = 2;
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, "accumulate: got 2, expected 0 or 1");
  backward.accumulate = 1;
  const Tensor<uint16_t> narrow({2, 4, 3});
  backward.d_w_out = narrow.view();
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT,
                 "d_w_out: got bfloat16 (7) [2, 4, 3], expected float32 [E=2, F=4, D=3]");
  backward.d_w_in = backward.d_w_out = nullptr;
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT,
                 "accumulate: got 1, expected 0, or 1 together with d_w_in or d_w_out");
  EXPECT_REFUSED(ab_expert_ffn_forward(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
  EXPECT_REFUSED(ab_expert_ffn_backward(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
}

// A network's rows and what its two products make of them, summed by token.
template <class T_>
struct Combined {
  const Network<T_>& net;
  Ints row_of_slot;
  Floats addend;
  Tensor<T_> a, want, got;

  explicit Combined(const Network<T_>& network)
      : net(network),
        row_of_slot({net.T, net.K}),
        addend(random({net.T, net.D}, 9)),
        a({net.R, net.F}),
        want({net.T, net.D}),
        got({net.T, net.D}) {
    for (int64_t r = 0; r < net.R; ++r) {
      const int32_t slot = net.slot_of_row[r];
      if (slot >= 0 && slot < net.T * net.K) row_of_slot[slot] = static_cast<int32_t>(r);
    }
  }

  static ab_tensor flat_view(const ab_tensor* view, int32_t rank) {
    ab_tensor flat = *view;
    flat.shape[rank - 1] *= flat.shape[rank];
    flat.rank = rank;
    return flat;
  }

  // In two operations, and in one.
  void expect_same(const Tensor<T_>& rows, ab_grouped_matmul_combine_args args) {
    const ab_tensor* weights = args.weight_early != 0 ? nullptr : args.weights;
    const ab_combine_args sum{sizeof(sum), rows.view(), args.row_of_slot, weights, want.view(), args.addend};
    EXPECT_OK(call(ab_combine, ab_combine_workspace, sum));
    for (const int threads : {1, 3}) {
      std::fill(got.values().begin(), got.values().end(), T_{});
      EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args, threads));
      EXPECT_EQ(got.values(), want.values());
    }
  }

  ab_grouped_matmul_combine_args args() const {
    ab_grouped_matmul_combine_args args{};
    args.size = sizeof(args);
    args.x = a.view();
    args.w = net.w_out.view();
    args.group_sizes = net.group_sizes.view();
    args.slot_of_row = net.slot_of_row.view();
    args.row_of_slot = row_of_slot.view();
    args.weights = net.weights.view();
    args.out = got.view();
    return args;
  }

  // weights: 0 none, 1 late, 2 early.
  void check_down(bool biased, int weights, bool adds) {
    ab_expert_ffn_forward_args forward = net.forward_args();
    forward.a = a.view();
    forward.weight_early = weights == 2 ? 1 : 0;
    if (!biased) forward.b_out = nullptr;
    if (weights != 2) forward.weights = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
    ab_grouped_matmul_combine_args down = args();
    down.weight_early = forward.weight_early;
    down.bias = forward.b_out;
    if (weights == 0) down.weights = nullptr;
    if (adds) down.addend = addend.view();
    expect_same(net.y, down);

    const std::vector<T_> both = a.values();
    std::fill(a.values().begin(), a.values().end(), T_{1});
    forward.y = forward.w_out = forward.b_out = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
    EXPECT_EQ(a.values(), both) << "the first half alone";
  }

  void check_dgrad(bool adds) {
    EXPECT_OK(net.forward());
    EXPECT_OK(net.backward());
    const ab_tensor dh = flat_view(net.dh.view(), 2);
    const ab_tensor w_in = flat_view(net.w_in.view(), 3);
    ab_grouped_matmul_combine_args dgrad = args();
    dgrad.transpose_w = 1;
    dgrad.x = &dh;
    dgrad.w = &w_in;
    dgrad.weights = nullptr;
    if (adds) dgrad.addend = addend.view();
    expect_same(net.dx_rows, dgrad);
  }
};

template <class T_>
void check_combined(const Network<T_>& net) {
  Combined<T_> combined(net);
  for (const bool adds : {false, true}) {
    combined.check_dgrad(adds);
    for (const int weights : {0, 1, 2}) {
      for (const bool biased : {false, true}) combined.check_down(biased, weights, adds);
    }
  }
}

// Slots in another order, every fifth row padding, the last rows past the groups.
std::vector<int32_t> mixed_slots(int64_t R, int64_t slots) {
  const int32_t none[] = {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(slots)};
  std::vector<int32_t> result(static_cast<size_t>(R));
  int64_t next = slots - 1;
  for (int64_t r = 0; r < R; ++r) {
    result[static_cast<size_t>(r)] = r % 5 == 3 || next < 0 ? none[r % 4] : static_cast<int32_t>(next--);
  }
  return result;
}

TEST(GroupedMatmulCombine, IsTheProductAndTheSum) {
  check_combined(Network<float>(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60)));
  check_combined(Network<uint16_t>(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60)));
  check_combined(Network<uint16_t>(300, 2, 600, 1, 130, {200, 0, 300, 90}, mixed_slots(600, 600)));
  check_combined(Network<float>(5, 2, 8, 2, 8, {0, 0}, mixed_slots(6, 10)));
}

TEST(GroupedMatmulCombine, EmptySizesAreOrdinary) {
  check_combined(Network<float>(3, 2, 4, 2, 5, {1, 0}, {}));
  check_combined(Network<float>(0, 2, 4, 2, 5, {1, 0}, {-1, -1}));
  check_combined(Network<float>(3, 2, 0, 2, 5, {1, 0}, slots_in_order(4)));
  check_combined(Network<float>(3, 2, 4, 2, 0, {1, 0}, slots_in_order(4)));
  check_combined(Network<float>(3, 2, 4, 2, 5, {}, slots_in_order(4)));
}

TEST(GroupedMatmulCombine, ABiasJoinsTransposedWeightsToo) {
  const Network<float> net(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60));
  Combined<float> combined(net);
  ab_expert_ffn_forward_args forward = net.forward_args();
  forward.a = combined.a.view();
  EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
  Floats transposed({net.E, net.D, net.F});
  for (int64_t i = 0; i < transposed.size(); ++i) {
    const int64_t e = i / (net.D * net.F);
    transposed[i] = net.w_out[(e * net.F + i % net.F) * net.D + i / net.F % net.D];
  }
  ab_grouped_matmul_combine_args args = combined.args();
  args.bias = net.b_out.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  const std::vector<double> want(combined.got.values().begin(), combined.got.values().end());
  args.transpose_w = 1;
  args.w = transposed.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  expect_near(combined.got, want, 1e-6, "out");
}

// Nothing is read or written out of bounds (under AddressSanitizer), and the sums are those of two operations.
TEST(GroupedMatmulCombine, MapsMayHoldAnything) {
  const Network<float> net(20, 3, 33, 2, 24, {INT32_MAX, -5, 3, INT32_MIN}, mixed_slots(70, 60));
  Combined<float> combined(net);
  for (int64_t slot = 0; slot < 60; ++slot) {
    combined.row_of_slot[slot] = static_cast<int32_t>(slot % 7 == 0 ? INT32_MIN : slot % 7 == 1 ? 70 : slot * 5 - 40);
  }
  combined.check_down(true, 1, false);
  combined.check_dgrad(true);
}

TEST(GroupedMatmulCombine, TheSumMayTakeThePlaceOfTheAddend) {
  const Network<float> net(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60));
  Combined<float> combined(net);
  combined.check_down(false, 1, true);
  ab_grouped_matmul_combine_args args = combined.args();
  args.out = args.addend = combined.addend.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  EXPECT_EQ(combined.addend.values(), combined.want.values());
}

TEST(GroupedMatmulCombine, RefusesWhatDoesNotFit) {
  const Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const Combined<float> combined(net);
  const auto refused = [&](auto change, const char* text) {
    ab_grouped_matmul_combine_args args = combined.args();
    args.bias = net.b_out.view();
    args.addend = combined.addend.view();
    change(args);
    EXPECT_REFUSED(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args), AB_INVALID_ARGUMENT,
                   text);
  };
  const Floats odd({1, 1});
  const Ints odd_ints({1, 1});
  refused([](auto& args) { args.size = 8; }, "ab_grouped_matmul_combine_args: got size 8, expected");
  refused([](auto& args) { args.transpose_w = 2; }, "transpose_w: got 2, expected 0 or 1");
  refused([](auto& args) { args.transpose_w = 1; }, "w: got float32 (8) [2, 4, 3], expected float32 [E=2, N, D=4]");
  refused([](auto& args) { args.weight_early = 2; }, "weight_early: got 2, expected 0, or 1 together with weights");
  refused(
      [](auto& args) {
        args.weight_early = 1;
        args.weights = nullptr;
      },
      "weight_early: got 1, expected 0, or 1 together with weights");
  refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  refused([&](auto& args) { args.w = odd.view(); }, "w: got float32 (8) [1, 1], expected float32 [E=2, D=4, N]");
  refused([&](auto& args) { args.group_sizes = odd.view(); },
          "group_sizes: got float32 (8) [1, 1], expected int32 [E]");
  refused([&](auto& args) { args.bias = odd.view(); }, "bias: got float32 (8) [1, 1], expected float32 [E=2, N=3]");
  refused([](auto& args) { args.slot_of_row = nullptr; }, "slot_of_row: got NULL, expected int32 [R=4]");
  refused([&](auto& args) { args.slot_of_row = odd_ints.view(); }, "slot_of_row: got int32 (4) [1, 1], expected");
  refused([](auto& args) { args.row_of_slot = nullptr; }, "row_of_slot: got NULL, expected int32 [T, K]");
  refused([&](auto& args) { args.weights = odd.view(); }, "weights: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.addend = odd.view(); }, "addend: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.out = odd.view(); }, "out: got float32 (8) [1, 1], expected");
  refused([](auto& args) { args.out = nullptr; }, "out: got NULL, expected");
  const ab_grouped_matmul_combine_args args = combined.args();
  EXPECT_REFUSED(ab_grouped_matmul_combine(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  EXPECT_REFUSED(ab_grouped_matmul_combine(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
}

TEST(ExpertFfn, TheFirstHalfAloneTakesNothingOfTheSecond) {
  const Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const Floats a({4, 4});
  const auto refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args args = net.forward_args();
    args.a = a.view();
    args.y = args.w_out = args.b_out = args.weights = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args));
    change(args);
    EXPECT_REFUSED(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args), AB_INVALID_ARGUMENT, text);
  };
  refused([&](auto& args) { args.w_out = net.w_out.view(); }, "w_out: got a tensor, expected NULL without y");
  refused([&](auto& args) { args.b_out = net.b_out.view(); }, "b_out: got a tensor, expected NULL without y");
  refused([&](auto& args) { args.weights = net.weights.view(); },
          "weights: got a tensor, expected NULL without y, or weight_early");
  refused([&](auto& args) { args.a = net.x.view(); }, "a: got float32 (8) [2, 3], expected float32 [R=4, F=4]");
  refused([&](auto& args) { args.a = nullptr; }, "w_out: got NULL, expected");
}

}  // namespace
}  // namespace anabranch::testing
