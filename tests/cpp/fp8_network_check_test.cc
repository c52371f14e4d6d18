// Bad arguments of an expert MLP in FP8.
#include "fp8_network.h"

namespace anabranch::testing {
namespace {

TEST(Fp8, TheNetworkRefusesBadArguments) {
  const QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
  net.compute();
  const QuantizedWeights w_in(net.w_in.view(), 0), w_out(net.w_out.view(), 0);
  const Bytes swapped = e4m3({net.E, net.F, net.P, net.D});
  const Floats odd({1, 1});
  const auto forward_refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args args = net.up_and_down();
    args.w_in_q = w_in.q_transposed.view();
    args.w_in_scales = w_in.scales.view();
    args.w_out_q = w_out.q_transposed.view();
    args.w_out_scales = w_out.scales.view();
    change(args);
    EXPECT_REFUSED(QuantizedNetwork::run(args), AB_INVALID_ARGUMENT, text);
  };
  const auto without = [](auto& args) {
    args.precision = AB_PRECISION_HIGHEST;
    args.w_in_q = args.w_in_scales = args.w_out_q = args.w_out_scales = nullptr;
  };
  forward_refused([](auto& args) { args.precision = 0; },
                  "w_in_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.w_out_scales = w_out.scales.view();
      },
      "w_out_scales: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.a = net.a.view();
        args.a_scales = net.a_scales.view();
      },
      "a_scales: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.a = net.a_q.view();
      },
      "a: got float8_e4m3 (9) [70, 384], expected float32 [R=70, F=384]");
  forward_refused([&](auto& args) { args.a = net.a_q.view(); }, "a_scales: got NULL, expected float32 [R=70, F/128=3]");
  forward_refused(
      [&](auto& args) {
        args.a = net.a.view();
        args.a_scales = net.a_scales.view();
      },
      "a_scales: got a tensor, expected NULL if a is not float8_e4m3");
  forward_refused([&](auto& args) { args.a_scales = net.a_scales.view(); },
                  "a_scales: got a tensor, expected NULL if a is not float8_e4m3");
  forward_refused([&](auto& args) { args.w_in_q = w_in.q.view(); },
                  "w_in_q: got float8_e4m3 (9) [4, 256, 2, 384], expected float8_e4m3 [E=4, P=2, F=384, D=256]");
  forward_refused([](auto& args) { args.w_in_scales = nullptr; },
                  "w_in_scales: got NULL, expected float32 [E=4, D/128=2, P=2, F/128=3]");
  forward_refused(
      [&](auto& args) {
        args.w_in = nullptr;
        args.w_in_q = swapped.view();
      },
      "w_in_q: got 384 parts, expected 2 (gate, up) or 1");
  forward_refused([&](auto& args) { args.w_out_q = w_out.q.view(); },
                  "w_out_q: got float8_e4m3 (9) [4, 384, 256], exp");
  forward_refused([&](auto& args) { args.w_out_scales = odd.view(); },
                  "w_out_scales: got float32 (8) [1, 1], expected");
  forward_refused(
      [&](auto& args) {
        args.a = net.a.view();
        args.y = args.w_out = args.b_out = args.weights = nullptr;
      },
      "w_out_q: got a tensor, expected NULL without y");
  forward_refused([&](auto& args) { args.x = w_out.q.view(); }, "x: got float8_e4m3");
  const QuantizedTensor x(net.x.view(), 0);
  forward_refused(
      [&](auto& args) {
        without(args);
        args.x_q = x.q.view();
      },
      "x_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused([&](auto& args) { args.x_q = x.q.view(); }, "x_scales: got NULL, expected float32 [T=30, D/128=2]");
  forward_refused([&](auto& args) { args.x_scales = x.scales.view(); },
                  "x_q: got NULL, expected float8_e4m3 [T=30, D=256]");
  forward_refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  forward_refused(
      [&](auto& args) {
        args.x = nullptr;
        args.x_q = net.x.view();
      },
      "x_q: got float32 (8) [30, 256], expected float8_e4m3 [T, D]");
  const Tensor<int32_t> integers({net.R, net.D});
  const Tensor<uint16_t> narrow({net.R, net.P, net.F});
  const auto pass_only_quantised_x = [&](auto& args) {
    args.x = nullptr;
    args.x_q = x.q.view();
    args.x_scales = x.scales.view();
  };
  forward_refused(
      [&](auto& args) {
        pass_only_quantised_x(args);
        args.y = integers.view();
      },
      "y: got int32 (4) [70, 256], expected float32 [R=70, D=256]");
  forward_refused(
      [&](auto& args) {
        pass_only_quantised_x(args);
        args.h = narrow.view();
      },
      "h: got bfloat16 (7) [70, 2, 384], expected float32 [R=70, P=2, F=384]");

  const auto backward_refused = [&](auto change, const char* text) {
    ab_expert_ffn_backward_args args = net.backward_all();
    change(args);
    EXPECT_REFUSED(QuantizedNetwork::run(args), AB_INVALID_ARGUMENT, text);
  };
  backward_refused([](auto& args) { args.precision = 1; },
                   "dh_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  backward_refused([](auto& args) { args.dh_scales = nullptr; },
                   "dh_scales: got NULL, expected float32 [R=70, P=2, F/128=3]");
  backward_refused([](auto& args) { args.dh_q = nullptr; }, "dh_q: got NULL, expected float8_e4m3 [R=70, P=2, F=384]");
  backward_refused(
      [&](auto& args) {
        args.w_in_q = w_in.q_transposed.view();
        args.w_in_scales = w_in.scales.view();
      },
      "w_in_q: got float8_e4m3 (9) [4, 2, 384, 256], expected float8_e4m3 [E=4, D=256, P=2, F=384]");
  backward_refused([&](auto& args) { args.w_out_q = w_out.q.view(); }, "w_out_scales: got NULL, expected");
  backward_refused([](auto& args) { args.h = args.d_weights = args.dx_rows = nullptr; },
                   "dh_q: got a tensor, expected NULL without h and dx_rows");
  const QuantizedTensor d_out(net.d_out.view(), 0);
  const auto pass_quantised_d_out = [&](auto& args) {
    args.d_out_q = d_out.q.view();
    args.d_out_scales = d_out.scales.view();
  };
  backward_refused(
      [&](auto& args) {
        args.precision = 1;
        args.dh_q = args.dh_scales = nullptr;
        pass_quantised_d_out(args);
      },
      "d_out_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  backward_refused(
      [&](auto& args) {
        pass_quantised_d_out(args);
        args.d_out_scales = nullptr;
      },
      "d_out_scales: got NULL, expected float32 [T=30, D/128=2]");
  backward_refused(
      [&](auto& args) {
        pass_quantised_d_out(args);
        args.d_out = nullptr;
      },
      "d_out: got NULL, expected");
  backward_refused(
      [&](auto& args) {
        pass_quantised_d_out(args);
        args.h = args.d_weights = nullptr;
      },
      "d_out_q: got a tensor, expected NULL without h");

  Network<float> ragged(3, 2, 100, 2, 128, {6}, slots_in_order(6));
  ragged.precision = AB_PRECISION_FP8;
  EXPECT_REFUSED(ragged.forward(), AB_INVALID_ARGUMENT, "x: got D=100, expected a multiple of 128");
  Network<float> thin(3, 2, 128, 2, 100, {6}, slots_in_order(6));
  thin.precision = AB_PRECISION_FP8;
  EXPECT_REFUSED(thin.forward(), AB_INVALID_ARGUMENT, "w_in: got F=100, expected a multiple of 128");
  EXPECT_REFUSED(thin.backward(), AB_INVALID_ARGUMENT, "w_in: got F=100, expected a multiple of 128");
}

}  // namespace
}  // namespace anabranch::testing
