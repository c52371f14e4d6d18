// The router with more than 2^31 logits.
#include <random>

#include "router_run.h"
#include "tall_mirrors.h"

namespace anabranch::testing {
namespace {

// With T * E > 2^31, the results and gradients of the last tokens have the same bits as in a small call.
void check_past_two_to_the_31(int64_t E, int32_t K, int32_t score_function) {
  Case small{2500, E, K, AB_BFLOAT16, score_function};  // enough tokens to select the same kernels
  const int64_t T = (int64_t{1} << 31) / E + 5000;
  const int64_t others = T - small.T;
  const Inputs in(small);
  for (const Form form : {Form::bytes, Form::aux}) {
    const Outputs want(small);
    const Outputs got(small);
    small.form = form;
    SCOPED_TRACE(small);
    run_on_device(small, in, want);
    TallMirrors mirrors(T, small.T);
    run(on_device(forward_args(small, in, got), [&](const ab_tensor* host) { return mirrors.add(host); }));
    mirrors.fetch();
    EXPECT_EQ(got.experts.values(), want.experts.values());
    EXPECT_EQ(got.lse.values(), want.lse.values());
    for (int64_t e = 0; e < E; ++e) {  // the other logits are 0 and select the lowest experts
      ASSERT_EQ(got.counts[e], want.counts[e] + (e < K ? others : 0)) << "of expert " << e;
    }
    if (form == Form::aux) {
      EXPECT_EQ(got.weights.values(), want.weights.values());
      EXPECT_EQ(got.aux.values(), want.aux.values());
      continue;
    }
    EXPECT_TRUE(got.probs.is(want.probs));
    EXPECT_EQ(got.bytes.values(), want.bytes.values());
    for (int64_t e = 0; e < E; ++e) {
      const double sum = want.score_sum[e] + static_cast<double>(others) / static_cast<double>(E);
      ASSERT_NEAR(got.score_sum[e], sum, 1e-4 * sum) << "of expert " << e;
    }
  }
  Tensor<float> d_weights({small.T, K});
  Tensor<float> d_aux({small.T, E});
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& value : d_weights.values()) value = normal(random);
  for (float& value : d_aux.values()) value = normal(random);
  const Outputs routed(small);
  run_on_device(small, in, routed);
  for (const bool auxiliary : {false, true}) {
    const FloatTensor d_want({small.T, E}, small.dtype);
    const FloatTensor d_got({small.T, E}, small.dtype);
    ab_router_backward_args args = backward_args(small, in, routed);
    args.d_weights = auxiliary ? nullptr : d_weights.view();
    args.experts = auxiliary ? nullptr : args.experts;
    args.scaling_factor = auxiliary ? 1.0f : args.scaling_factor;
    args.d_aux_scores = auxiliary ? d_aux.view() : nullptr;
    args.d_logits = d_want.view();
    Mirrors small_mirrors;
    ab_router_backward_args call = on_device(args, add_to(&small_mirrors));
    EXPECT_OK(ab_cuda_router_backward(&call, nullptr));
    small_mirrors.fetch();
    args.d_logits = d_got.view();
    TallMirrors mirrors(T, small.T);
    call = on_device(args, [&](const ab_tensor* host) { return mirrors.add(host); });
    EXPECT_OK(ab_cuda_router_backward(&call, nullptr));
    mirrors.fetch();
    EXPECT_TRUE(d_got.is(d_want)) << "auxiliary " << auxiliary;
  }
}

class RouterTallCuda : public CudaTest {};

TEST_F(RouterTallCuda, MoreThanTwoToThe31Logits) {
  SKIP_WITHOUT_GIB(24);
  check_past_two_to_the_31(512, 8, AB_SOFTMAX);
}

TEST_F(RouterTallCuda, MoreThanTwoToThe31LogitsOfWideRows) {
  SKIP_WITHOUT_GIB(24);
  check_past_two_to_the_31(2304, 36, AB_SIGMOID);
}

}  // namespace
}  // namespace anabranch::testing
