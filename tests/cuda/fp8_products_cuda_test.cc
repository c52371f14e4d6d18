// FP8 GEMMs on Hopper: calls that consist of several GEMMs, and padding rows. The Python tests compare values and
// gradients with the oracle.
#include "anabranch/cuda.h"
#include "device.h"
#include "float_tensor.h"
#include "quantized.h"

namespace anabranch::testing {
namespace {

using Fp8ProductsCuda = HopperTest;

// dx_rows has the same bits when computed from dh, with gate and up interleaved or not, and from dh_q.
TEST_F(Fp8ProductsCuda, ACallWithoutHQuantisesDh) {
  constexpr int64_t E = 2, D = 128, P = 2, F = 256, R = 75;
  for (const bool interleaved : {false, true}) {
    FloatTensor x({R, D}, AB_BFLOAT16), w_in({E, D, P, F}, AB_BFLOAT16), dh({R, P, F}, AB_BFLOAT16);
    FloatTensor w_out({E, F, D}, AB_BFLOAT16);
    x.fill_normal(1);
    w_in.fill_normal(2);
    dh.fill_normal(3);
    w_out.fill_normal(4);
    FloatTensor gate_then_up({R, P, F}, AB_BFLOAT16);
    for (int64_t i = 0; i < R * P * F; ++i) {
      const int64_t row = i / (P * F), part = i / F % P, f = i % F;
      gate_then_up.set(i, dh.get(interleaved ? (row * F + f) * P + part : i));
    }
    const Bytes q = e4m3({R, P, F});
    const Tensor<float> scales({R, P, F / kBlock});
    const ab_tensor rows{gate_then_up.view()->data, AB_BFLOAT16, 2, {R, P * F}, nullptr};
    const ab_tensor q_rows{q.view()->data, AB_FLOAT8_E4M3, 2, {R, P * F}, nullptr};
    const ab_tensor scale_rows{scales.view()->data, AB_FLOAT32, 2, {R, P * F / kBlock}, nullptr};
    const ab_quantize_rows_args quantize{sizeof(quantize), 0, &rows, &q_rows, &scale_rows};
    EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, quantize));

    const FloatTensor from_dh({R, D}, AB_BFLOAT16), from_dh_q({R, D}, AB_BFLOAT16);
    const Tensor<int32_t> sizes({E}, {40, 35});
    const int64_t in_strides[] = {D * P * F, P * F, 1, P};
    const int64_t h_strides[] = {P * F, 1, P};
    for (const bool quantised : {false, true}) {
      Mirrors mirrors;
      ab_tensor w = *mirrors.add(w_in.view());
      ab_tensor d = *mirrors.add(dh.view());
      if (interleaved) {
        w.strides = in_strides;
        d.strides = h_strides;
      }
      ab_expert_ffn_backward_args args{};
      args.size = sizeof(args);
      args.precision = AB_PRECISION_FP8;
      args.x = mirrors.add(x.view());
      args.w_in = &w;
      args.w_out = mirrors.add(w_out.view());
      args.group_sizes = mirrors.add(sizes.view());
      if (!quantised) args.dh = &d;
      args.dx_rows = mirrors.add((quantised ? from_dh_q : from_dh).view());
      if (quantised) {
        args.dh_q = mirrors.add(q.view());
        args.dh_scales = mirrors.add(scales.view());
      }
      size_t bytes = 0;
      EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
      DeviceWorkspace workspace(bytes);
      EXPECT_OK(ab_cuda_expert_ffn_backward(&args, &workspace.exec()));
      mirrors.fetch();
      workspace.check();
    }
    for (int64_t i = 0; i < R * D; ++i) ASSERT_EQ(from_dh.get(i), from_dh_q.get(i)) << interleaved << " " << i;
  }
}

// A network whose tokens and cotangents are passed in quantised or not. Quantised tokens replace x.
struct GivenRows {
  static constexpr int64_t E = 2, D = 256, P = 2, F = 256, T = 60, R = 75;
  static constexpr int32_t K = 2;
  FloatTensor x, d_out, w_in, w_out;
  Tensor<float> weights{{T, K}};
  Tensor<int32_t> slots{{R}}, sizes{{E}, {40, 33}};
  Bytes x_q = e4m3({T, D}), d_out_q = e4m3({T, D});
  Tensor<float> x_scales{{T, D / kBlock}}, d_out_scales{{T, D / kBlock}};

  GivenRows(int32_t dtype, int32_t kind)
      : x({T, D}, dtype), d_out({T, D}, dtype), w_in({E, D, P, F}, dtype), w_out({E, F, D}, dtype), kind_(kind) {
    unsigned seed = 0;
    for (FloatTensor* tensor : {&x, &d_out, &w_in, &w_out}) tensor->fill_normal(++seed);
    for (int64_t i = 0; i < T * K; ++i) weights[i] = 0.25f * static_cast<float>(i % 5 - 2);
    for (int64_t r = 0; r < R; ++r) slots[r] = r % 7 == 3 ? -1 : static_cast<int32_t>(r * 37 % (T * K));
    quantise(x, x_q, x_scales);
    quantise(d_out, d_out_q, d_out_scales);
  }

  // Returns the bytes of h, `a`, its scales, dh, w a and d_weights.
  std::vector<std::vector<uint8_t>> results(bool given) const {
    const int32_t dtype = x.dtype();
    const FloatTensor h({R, P, F}, dtype), dh({R, P, F}, dtype), weighted_a({R, F}, dtype);
    const Bytes a = e4m3({R, F});
    const Tensor<float> a_scales({R, F / kBlock}), d_weights({T, K});
    ab_expert_ffn_forward_args forward{};
    ab_expert_ffn_backward_args backward{};
    Mirrors mirrors;
    (given ? forward.x_q : forward.x) = mirrors.add((given ? x_q.view() : x.view()));
    if (given) forward.x_scales = mirrors.add(x_scales.view());
    if (given) backward.d_out_q = mirrors.add(d_out_q.view());
    if (given) backward.d_out_scales = mirrors.add(d_out_scales.view());
    forward.a = mirrors.add(a.view());
    forward.a_scales = mirrors.add(a_scales.view());
    backward.x = mirrors.add(x.view());
    backward.d_out = mirrors.add(d_out.view());
    backward.w_out = mirrors.add(w_out.view());
    backward.weights = mirrors.add(weights.view());
    backward.dh = mirrors.add(dh.view());
    backward.weighted_a = mirrors.add(weighted_a.view());
    backward.d_weights = mirrors.add(d_weights.view());
    forward.w_in = backward.w_in = mirrors.add(w_in.view());
    forward.slot_of_row = backward.slot_of_row = mirrors.add(slots.view());
    forward.group_sizes = backward.group_sizes = mirrors.add(sizes.view());
    forward.h = backward.h = mirrors.add(h.view());
    run(ab_cuda_expert_ffn_forward_workspace, ab_cuda_expert_ffn_forward, &forward);
    run(ab_cuda_expert_ffn_backward_workspace, ab_cuda_expert_ffn_backward, &backward);
    mirrors.fetch();
    std::vector<std::vector<uint8_t>> bytes_of_results;
    for (const ab_tensor* tensor :
         {h.view(), a.view(), a_scales.view(), dh.view(), weighted_a.view(), d_weights.view()}) {
      const auto* data = static_cast<const uint8_t*>(tensor->data);
      bytes_of_results.emplace_back(data, data + bytes_of(*tensor));
    }
    return bytes_of_results;
  }

 private:
  int32_t kind_;

  void quantise(const FloatTensor& rows, const Bytes& q, const Tensor<float>& scales) const {
    const ab_quantize_rows_args args{sizeof(args), kind_, rows.view(), q.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
  }

  template <class Args>
  void run(ab_status (*query)(const Args*, const ab_exec*, size_t*),
           ab_status (*operation)(const Args*, const ab_exec*), Args* args) const {
    args->size = sizeof(Args);
    args->precision = AB_PRECISION_FP8;
    args->fp8_scales = kind_;
    args->topk = K;
    size_t bytes = 0;
    EXPECT_OK(query(args, nullptr, &bytes));
    DeviceWorkspace workspace(bytes);
    EXPECT_OK(operation(args, &workspace.exec()));
    workspace.check();
  }
};

// Rows that the caller quantised give the same bits as rows that the call quantises.
TEST_F(Fp8ProductsCuda, QuantisedRowsMatchQuantisingInTheCall) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    for (const int32_t kind : {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO}) {
      const GivenRows network(dtype, kind);
      EXPECT_EQ(network.results(true), network.results(false)) << dtype << " " << kind;
    }
  }
}

// With more rows than the workspace can hold, the operation runs in chunks of columns. The last chunk starts inside the
// scales.
TEST_F(Fp8ProductsCuda, ChunksOfColumnsMatchOneGemm) {
  constexpr int64_t E = 2, R = 8192, N = 2176, K = 2, T = R / K;
  for (const bool transposed : {false, true}) {
    for (const bool given : {false, true}) {
      const int64_t D = transposed ? 1024 : 128;
      FloatTensor x({R, D}, AB_BFLOAT16);
      FloatTensor w(transposed ? std::vector{E, N, D} : std::vector{E, D, N}, AB_BFLOAT16);
      x.fill_normal(1);
      w.fill_normal(2);
      const Tensor<int32_t> sizes({E}, {R - 1000, 1000});
      Tensor<int32_t> slots({R}), rows({T, K});
      for (int32_t i = 0; i < R; ++i) slots[i] = rows[i] = i;
      const Bytes q = e4m3({E, N, D}), q_transposed = e4m3({E, D, N});
      const Tensor<float> scales({E, w.view()->shape[1] / kBlock, w.view()->shape[2] / kBlock});
      const ab_quantize_weights_args quantize{
          sizeof(quantize), 0, w.view(), (transposed ? q : q_transposed).view(), (transposed ? q_transposed : q).view(),
          scales.view()};
      EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, quantize));

      const FloatTensor y({R, N}, AB_BFLOAT16), want({T, N}, AB_BFLOAT16), got({T, N}, AB_BFLOAT16);
      using Matmul = ab_grouped_matmul_args;
      Matmul matmul{};
      matmul.size = sizeof(matmul);
      matmul.transpose_w = transposed;
      matmul.x = x.view();
      matmul.w = given ? nullptr : w.view();
      matmul.group_sizes = sizes.view();
      matmul.y = y.view();
      matmul.precision = AB_PRECISION_FP8;
      if (given) {
        matmul.w_q = q.view();
        matmul.w_scales = scales.view();
      }
      run_on_copies(ab_cuda_grouped_matmul_workspace, ab_cuda_grouped_matmul, matmul, &Matmul::x, &Matmul::w,
                    &Matmul::group_sizes, &Matmul::y, &Matmul::w_q, &Matmul::w_scales);
      Mirrors mirrors;
      ab_combine_args sum{sizeof(sum), mirrors.add(y.view()),    mirrors.add(rows.view()),
                          nullptr,     mirrors.add(want.view()), nullptr};
      EXPECT_OK(ab_cuda_combine(&sum, nullptr));
      mirrors.fetch();

      using Combine = ab_grouped_matmul_combine_args;
      Combine combine{};
      combine.size = sizeof(combine);
      combine.transpose_w = transposed;
      combine.x = matmul.x;
      combine.w = matmul.w;
      combine.group_sizes = sizes.view();
      combine.slot_of_row = slots.view();
      combine.row_of_slot = rows.view();
      combine.out = got.view();
      combine.precision = AB_PRECISION_FP8;
      combine.w_q = matmul.w_q;
      combine.w_scales = matmul.w_scales;
      run_on_copies(ab_cuda_grouped_matmul_combine_workspace, ab_cuda_grouped_matmul_combine, combine, &Combine::x,
                    &Combine::w, &Combine::group_sizes, &Combine::slot_of_row, &Combine::row_of_slot, &Combine::out,
                    &Combine::w_q, &Combine::w_scales);
      EXPECT_TRUE(got.is(want)) << transposed << " " << given;
    }
  }
}

// The call has only padding rows and no tokens, so there are no scales to read.
TEST_F(Fp8ProductsCuda, AcceptsPaddingWithoutTokens) {
  constexpr int64_t E = 2, D = 256, P = 2, F = 128, R = 9, K = 2;
  const FloatTensor x({0, D}, AB_BFLOAT16), d_out({0, D}, AB_BFLOAT16);
  FloatTensor w_in({E, D, P, F}, AB_BFLOAT16), w_out({E, F, D}, AB_BFLOAT16);
  w_in.fill_normal(1);
  w_out.fill_normal(2);
  const Tensor<int32_t> sizes({E}, {4, 5}), slots({R}, std::vector<int32_t>(R, -1));
  FloatTensor y({R, D}, AB_BFLOAT16), h({R, P, F}, AB_BFLOAT16), dh({R, P, F}, AB_BFLOAT16), dx({R, D}, AB_BFLOAT16);
  FloatTensor d_w_in({E, D, P, F}, AB_BFLOAT16);
  for (FloatTensor* out : {&y, &h, &dh, &dx, &d_w_in}) {
    for (int64_t i = 0; i < out->size(); ++i) out->set(i, NAN);
  }
  using Forward = ab_expert_ffn_forward_args;
  Forward forward{};
  forward.size = sizeof(forward);
  forward.topk = K;
  forward.precision = AB_PRECISION_FP8;
  forward.x = x.view();
  forward.slot_of_row = slots.view();
  forward.group_sizes = sizes.view();
  forward.w_in = w_in.view();
  forward.w_out = w_out.view();
  forward.y = y.view();
  forward.h = h.view();
  run_on_copies(ab_cuda_expert_ffn_forward_workspace, ab_cuda_expert_ffn_forward, forward, &Forward::x,
                &Forward::slot_of_row, &Forward::group_sizes, &Forward::w_in, &Forward::w_out, &Forward::y,
                &Forward::h);
  using Backward = ab_expert_ffn_backward_args;
  Backward backward{};
  backward.size = sizeof(backward);
  backward.topk = K;
  backward.precision = AB_PRECISION_FP8;
  backward.x = x.view();
  backward.slot_of_row = slots.view();
  backward.group_sizes = sizes.view();
  backward.w_in = w_in.view();
  backward.w_out = w_out.view();
  backward.h = h.view();
  backward.d_out = d_out.view();
  backward.dh = dh.view();
  backward.dx_rows = dx.view();
  backward.d_w_in = d_w_in.view();
  run_on_copies(ab_cuda_expert_ffn_backward_workspace, ab_cuda_expert_ffn_backward, backward, &Backward::x,
                &Backward::slot_of_row, &Backward::group_sizes, &Backward::w_in, &Backward::w_out, &Backward::h,
                &Backward::d_out, &Backward::dh, &Backward::dx_rows, &Backward::d_w_in);
  for (const FloatTensor* out : {&y, &h, &dh, &dx, &d_w_in}) {
    for (int64_t i = 0; i < out->size(); ++i) ASSERT_EQ(out->get(i), 0.0f) << i;
  }
}

}  // namespace
}  // namespace anabranch::testing
