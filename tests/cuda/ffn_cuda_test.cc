// The expert MLP on the GPU against the CPU.
#include "anabranch/cuda_workspaces.h"
#include "ffn_case.h"
#include "two_calls.h"

namespace anabranch::testing {
namespace {

using FfnCuda = ExpertsCudaTest;

const std::vector<int32_t> kGroups = {3, 0, 64, 1, 70, 0, 9};  // 147 rows

TEST_F(FfnCuda, EveryOptionMatchesTheCpu) {
  unsigned seed = 0;
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const int64_t P : {1, 2}) {
      for (int32_t activation = AB_SILU; activation < (P == 2 ? AB_SITU + 1 : AB_SWIGLU_CLAMPED); ++activation) {
        for (const Weighting weighting : {Weighting::none, Weighting::late, Weighting::early}) {
          for (const bool biases : {false, true}) {
            const bool by_slot = ++seed % 3 != 0;
            const bool aligned = seed % 2 == 0;  // aligned widths, which tensor cores require, or odd ones
            FfnCase c{kGroups, 150, aligned ? 64 : 13, aligned ? 72 : 7, P};
            if (by_slot) {
              c.T = 61;
              c.K = 3;
            }
            c.dtype = dtype;
            c.activation = activation;
            c.weighting = weighting;
            c.biases = biases;
            check(c, seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(FfnCuda, WeightsLieInAnyLayout) {
  unsigned seed = 1000;
  for (int layout = 1; layout < static_cast<int>(kLayouts.size()); ++layout) {
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      for (const int64_t P : {1, 2}) {
        for (const bool by_slot : {true, false}) {
          for (const bool aligned : {true, false}) {
            FfnCase c{kGroups, 150, aligned ? 64 : 13, aligned ? 72 : 7, P};
            if (by_slot) {
              c.T = 61;
              c.K = 3;
            }
            c.dtype = dtype;
            c.layout = layout;
            c.activation = static_cast<int32_t>(seed % (P == 2 ? AB_SITU + 1 : AB_SWIGLU_CLAMPED));
            c.weighting = seed % 2 == 0 ? Weighting::late : Weighting::early;
            c.biases = seed % 3 != 0;
            c.accumulate = seed % 5 == 0;
            check(c, ++seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// The weights span several tiles of 256 columns, and the sums are longer.
TEST_F(FfnCuda, WeightsOfSeveralTilesLieInAnyLayout) {
  for (int layout = 1; layout < static_cast<int>(kLayouts.size()); ++layout) {
    for (const int64_t P : {1, 2}) {
      FfnCase c{{0, 400, 130, 0, 700, 64}, 1300, 520, 328, P};
      c.T = 650;
      c.K = 2;
      c.layout = layout;
      c.activation = P == 2 ? AB_SWIGLU_OAI : AB_GELU;
      check(c, static_cast<unsigned>(2000 + layout));
      if (HasFatalFailure()) return;
    }
  }
}

// A cotangent of another dtype gives the same bits as a cotangent that is first rounded to the dtype of x.
TEST_F(FfnCuda, CotangentsAndWeightsHaveAnyDtype) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const int32_t weights : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      for (const Weighting weighting : {Weighting::late, Weighting::early}) {
        FfnCase c{kGroups, 147, 24, 40, 2, 80, 2, dtype, AB_GELU, weighting, true, 0, weights};
        for (const int32_t d_out : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
          c.d_out = d_out;
          SCOPED_TRACE(::testing::Message() << c);
          const Network got(c);
          got.on_gpu();
          c.d_out = dtype;
          Network rounded(c);
          for (int64_t i = 0; i < got.d_out.size(); ++i) rounded.d_out.set(i, got.d_out.get(i));
          rounded.on_gpu();
          got.expect_same_bits(rounded);
          rounded.on_cpu();
          compare(got, rounded);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Covers both tile sizes, weights in both orientations, and widths with and without a partial chunk.
TEST_F(FfnCuda, Tf32IsCloseToTheCpu) {
  for (const int layout : {0, 1}) {
    for (const FfnCase& shape :
         {FfnCase{kGroups, 150, 64, 72, 2, 61, 3}, FfnCase{kGroups, 150, 13, 7, 1, 0, 0},
          FfnCase{{300, 0, 129, 17}, 460, 136, 40, 2, 230, 2}, FfnCase{{520, 20}, 540, 24, 130, 1, 270, 2}}) {
      FfnCase c = shape;
      c.dtype = AB_FLOAT32;
      c.layout = layout;
      c.precision = AB_PRECISION_TF32;
      check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(FfnCuda, GradientsOfWeightsAccumulate) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const int64_t D : {64, 13}) {
      FfnCase c{kGroups, 150, D, 72, 2, 61, 3, dtype};
      c.accumulate = true;
      check(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(FfnCuda, EveryShapeMatchesTheCpu) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    check_with_and_without_biases({{1}, 1, 1, 1, 2, 1, 1, dtype});
    check_with_and_without_biases({{1}, 1, 1, 1, 1, 0, 0, dtype});
    check_with_and_without_biases(
        {kUneven, 1300, 136, 264, 2, 500, 3, dtype});  // more slots than rows, rows past the groups
    check_with_and_without_biases({kUneven, 1217, 33, 130, 2, 100, 8, dtype});  // fewer slots than rows
    check_with_and_without_biases({kUneven, 1217, 72, 65, 1, 0, 0, dtype});
    check_with_and_without_biases(
        {{5000, 0, 20, 1500}, 6600, 136, 72, 2, 3300, 2, dtype});  // sums over rows that are split
    check_with_and_without_biases({{512, 0, 513, 1, 511, 1024}, 2561, 40, 24, 1, 1000, 3, dtype});
    check_with_and_without_biases({{0, 0, 0}, 5, 16, 8, 2, 4, 2, dtype});
    check_with_and_without_biases({{150000, 0, 160000}, 320000, 8, 8, 2, 160000, 2, dtype});  // more rows than threads
    if (HasFatalFailure()) return;
  }
}

TEST_F(FfnCuda, AcceptsEmptySizes) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const int64_t K : {0, 2}) {
      check_with_and_without_biases({{2, 1}, 0, 8, 16, 2, K * 3, K, dtype});           // R
      check_with_and_without_biases({{2, 1}, 4, 0, 16, 2, K * 3, K, dtype});           // D
      check_with_and_without_biases({{2, 1}, 4, 8, 0, 2, K * 3, K, dtype});            // F
      check_with_and_without_biases({{}, 4, 8, 16, 2, K * 3, K, dtype});               // E
      check_with_and_without_biases({{2, 1}, K == 0 ? 0 : 4, 8, 16, 2, 0, K, dtype});  // T
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(FfnCuda, ManyExperts) {
  std::mt19937 random(4);
  std::vector<int32_t> sizes(700);
  int64_t R = 9;
  for (int32_t& size : sizes) R += size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 12);
  check_with_and_without_biases({sizes, R, 24, 16, 2, R, 2});
  check_with_and_without_biases({sizes, R, 24, 16, 2, R, 2, AB_FLOAT32});
}

TEST_F(FfnCuda, GroupSizesAreClippedToTheRows) {
  for (const int64_t D : {64, 13}) {
    for (const int64_t K : {0, 2}) {
      for (const std::vector<int32_t>& sizes :
           {std::vector<int32_t>{-5, 3, INT32_MIN, 4, -1}, {2, INT32_MAX, INT32_MAX, 1}, {INT32_MAX, -1, INT32_MAX}}) {
        check_with_and_without_biases({sizes, 600, D, 8, 2, 300 * K, K});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// NaN in a weight does not reach padding or other experts.
TEST_F(FfnCuda, NanInWeightsStaysOutOfPadding) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const int64_t D : {64, 13}) {
      for (const Weighting weighting : {Weighting::none, Weighting::late, Weighting::early}) {
        for (const bool biases : {false, true}) {
          Network net({{40, 30}, 80, D, 24, 2, 50, 2, dtype, AB_SILU, weighting, biases});
          net.w_in.set(0, std::numeric_limits<float>::quiet_NaN());
          net.w_out.set(0, std::numeric_limits<float>::quiet_NaN());
          net.on_gpu();
          for (int64_t r = 0; r < net.c.R; ++r) {
            for (const FloatTensor* rows : {&net.y, &net.h, &net.dh, &net.dx_rows}) {
              const int64_t width = rows->size() / net.c.R;
              for (int64_t i = r * width; i < (r + 1) * width; ++i) {
                if (net.slot_of(r) < 0) {
                  ASSERT_EQ(rows->get(i), 0.0f) << "padding row " << r;
                } else if (r >= 40) {
                  ASSERT_TRUE(std::isfinite(rows->get(i))) << "row " << r;
                }
              }
            }
          }
          for (int64_t i = net.d_w_in.size() / 2; i < net.d_w_in.size(); ++i) {
            ASSERT_TRUE(std::isfinite(net.d_w_in.get(i)));
          }
          for (int64_t i = net.d_w_out.size() / 2; i < net.d_w_out.size(); ++i) {
            ASSERT_TRUE(std::isfinite(net.d_w_out.get(i)));
          }
          EXPECT_TRUE(std::isnan(net.dx_rows.get(0)) || net.slot_of(0) < 0);
        }
      }
    }
  }
}

// NaN in a row reaches only the results of that row and the sums over it.
TEST_F(FfnCuda, NanInARowDoesNotReachOtherRows) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const int64_t D : {64, 13}) {
      Network net({{40, 30}, 72, D, 24, 2, 0, 0, dtype});
      constexpr int64_t kRow = 5;
      net.x.set(kRow * D, std::numeric_limits<float>::quiet_NaN());
      net.d_out.set(kRow * D, std::numeric_limits<float>::quiet_NaN());
      net.on_gpu();
      for (int64_t r = 0; r < net.c.R; ++r) {
        for (const FloatTensor* rows : {&net.y, &net.h, &net.dh, &net.dx_rows}) {
          const int64_t width = rows->size() / net.c.R;
          for (int64_t i = r * width; i < (r + 1) * width; ++i) ASSERT_EQ(std::isnan(rows->get(i)), r == kRow) << r;
        }
        ASSERT_EQ(std::isnan(net.d_weights.get(r)), r == kRow) << r;
      }
      for (const FloatTensor* weights : {&net.d_w_out, &net.d_b_in, &net.d_b_out}) {
        EXPECT_TRUE(std::isnan(weights->get(0)));
        for (int64_t i = weights->size() / 2; i < weights->size(); ++i) ASSERT_TRUE(std::isfinite(weights->get(i)));
      }
    }
  }
}

TEST_F(FfnCuda, DhMayAliasH) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const int64_t P : {1, 2}) {
      const FfnCase c{kUneven, 1300, 72, 136, P, 500, 3, dtype};
      const Network separate(c);
      separate.on_gpu();
      const Network aliased(c);
      ab_expert_ffn_backward_args args = aliased.backward_args();
      using A = ab_expert_ffn_backward_args;
      Mirrors mirrors;
      for (const auto member :
           {&A::x, &A::slot_of_row, &A::group_sizes, &A::w_in, &A::w_out, &A::b_out, &A::weights, &A::h, &A::d_out,
            &A::dx_rows, &A::d_w_in, &A::d_b_in, &A::d_w_out, &A::d_b_out, &A::d_weights}) {
        args.*member = mirrors.add(args.*member);
      }
      args.dh = args.h;
      size_t bytes = 0;
      EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
      DeviceWorkspace workspace(bytes);
      EXPECT_OK(ab_cuda_expert_ffn_backward(&args, &workspace.exec()));
      mirrors.fetch();
      workspace.check();
      EXPECT_TRUE(aliased.saved_h.is(separate.dh));
      EXPECT_TRUE(aliased.dx_rows.is(separate.dx_rows));
      EXPECT_TRUE(aliased.d_w_in.is(separate.d_w_in));
      EXPECT_TRUE(aliased.d_b_in.is(separate.d_b_in));
      EXPECT_TRUE(aliased.d_w_out.is(separate.d_w_out));
      EXPECT_TRUE(aliased.d_b_out.is(separate.d_b_out));
      EXPECT_TRUE(aliased.d_weights.is(separate.d_weights));
    }
  }
}

TEST_F(FfnCuda, TwoCallsMatchOne) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const bool biases : {false, true}) {
      FfnCase c{kUneven, 1300, 72, 136, 2, 500, 3, dtype};
      c.biases = biases;
      const Network one(c);
      one.on_gpu();
      for (const bool w_out_comes_first : {false, true}) {
        const Network two(c);
        const FloatTensor weighted_a({c.R, c.F}, dtype);
        const auto [first, second] = in_two_calls(two.backward_args(), weighted_a.view(), w_out_comes_first);
        Network::forward_on_gpu(two.forward_args());
        Network::backward_on_gpu(first);
        Network::backward_on_gpu(second);
        two.expect_same_bits(one);
        for (int64_t i = two.ends.back() * c.F; i < c.R * c.F; ++i) ASSERT_EQ(weighted_a.get(i), 0.0f) << i;
      }
    }
  }
}

TEST_F(FfnCuda, PaddingRowsOfTheSecondCallAreIgnored) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    const FfnCase c{kGroups, 150, 64, 72, 2, 61, 3, dtype};
    const Network one(c);
    one.on_gpu();
    Network two(c);
    FloatTensor weighted_a({c.R, c.F}, dtype);
    const auto [first, second] = in_two_calls(two.backward_args(), weighted_a.view(), false);
    Network::forward_on_gpu(two.forward_args());
    Network::backward_on_gpu(first);
    int64_t padding = 0;
    for (int64_t r = 0; r < c.R; ++r) {
      if (two.slot_of(r) >= 0) continue;
      for (int64_t i = 0; i < c.P * c.F; ++i) two.dh.set(r * c.P * c.F + i, 3.0f);
      for (int64_t i = 0; i < c.F; ++i) weighted_a.set(r * c.F + i, 3.0f);
      padding += r < two.ends.back() ? 1 : 0;
    }
    ASSERT_GT(padding, 0);
    Network::backward_on_gpu(second);
    for (int64_t i = 0; i < two.dh.size(); ++i) two.dh.set(i, one.dh.get(i));
    two.expect_same_bits(one);
  }
}

TEST_F(FfnCuda, EachOutputIsTheSameAlone) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const int64_t D : {72, 13}) {
      const FfnCase c{kUneven, 1300, D, 136, 2, 500, 3, dtype};
      const Network all(c);
      all.on_gpu();
      const Network one(c);
      ab_expert_ffn_forward_args forward = one.forward_args();
      forward.h = nullptr;
      Network::forward_on_gpu(forward);
      EXPECT_TRUE(one.y.is(all.y));
      Network::forward_on_gpu(one.forward_args());
      using A = ab_expert_ffn_backward_args;
      const auto outputs = {&A::dh, &A::dx_rows, &A::d_w_in, &A::d_b_in, &A::d_w_out, &A::d_b_out, &A::d_weights};
      for (const auto requested : outputs) {
        A args = one.backward_args();
        for (const auto output : outputs) args.*output = nullptr;
        args.*requested = one.backward_args().*requested;
        Network::backward_on_gpu(args);
      }
      one.expect_same_bits(all);
    }
  }
}

// The Hopper kernels require 16-byte aligned addresses; the size of the workspace does not depend on alignment.
TEST_F(FfnCuda, UnalignedOperands) {
  const FfnCase c{kGroups, 150, 64, 72, 2, 61, 3};
  const Network want(c);
  want.on_cpu();
  const Network got(c);
  Mirrors mirrors;
  ab_expert_ffn_forward_args forward = got.forward_args();
  using Forward = ab_expert_ffn_forward_args;
  for (const auto member :
       {&Forward::x, &Forward::w_in, &Forward::b_in, &Forward::w_out, &Forward::b_out, &Forward::y, &Forward::h}) {
    forward.*member = mirrors.add(forward.*member, 2);
  }
  for (const auto member : {&Forward::slot_of_row, &Forward::group_sizes, &Forward::weights}) {
    forward.*member = mirrors.add(forward.*member);
  }
  ab_expert_ffn_backward_args backward = got.backward_args();
  using Backward = ab_expert_ffn_backward_args;
  for (const auto member : {&Backward::x, &Backward::w_in, &Backward::w_out, &Backward::b_out, &Backward::h,
                            &Backward::d_out, &Backward::dh, &Backward::dx_rows, &Backward::d_w_in, &Backward::d_b_in,
                            &Backward::d_w_out, &Backward::d_b_out}) {
    backward.*member = mirrors.add(backward.*member, 2);
  }
  for (const auto member : {&Backward::slot_of_row, &Backward::group_sizes, &Backward::weights, &Backward::d_weights}) {
    backward.*member = mirrors.add(backward.*member);
  }
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes));
  DeviceWorkspace for_forward(bytes);
  EXPECT_OK(ab_cuda_expert_ffn_forward(&forward, &for_forward.exec()));
  EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&backward, nullptr, &bytes));
  DeviceWorkspace for_backward(bytes);
  EXPECT_OK(ab_cuda_expert_ffn_backward(&backward, &for_backward.exec()));
  mirrors.fetch();
  for_forward.check();
  for_backward.check();
  compare(got, want);
}

// Device memory without a host copy, zero at first.
class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    EXPECT_CUDA(cudaMalloc(&data_, bytes_));
    EXPECT_CUDA(cudaMemset(data_, 0, bytes_));
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void* data() const { return data_; }
  void put_last(const ab_tensor* from) const {
    const auto bytes = static_cast<size_t>(bytes_of(*from));
    EXPECT_CUDA(cudaMemcpy(static_cast<char*>(data_) + bytes_ - bytes, from->data, bytes, cudaMemcpyHostToDevice));
  }
  void get_last(const ab_tensor* to) const {
    const auto bytes = static_cast<size_t>(bytes_of(*to));
    EXPECT_CUDA(cudaMemcpy(to->data, static_cast<char*>(data_) + bytes_ - bytes, bytes, cudaMemcpyDeviceToHost));
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// With T D, R F and R P F above 2^31, the rows of the last tokens have the same results as in a small network. The
// tokens before them are zero and add nothing to the gradients of weights.
TEST_F(FfnCuda, MoreThanTwoToThe31Elements) {
  constexpr int64_t kTail = 300;
  constexpr int64_t D = 1024;
  constexpr int64_t F = 1024;
  constexpr int64_t T = (int64_t{1} << 31) / D + 5000;
  SKIP_WITHOUT_GIB(56);
  const Network want({{100, 200}, kTail, D, F, 2, kTail, 1});
  want.on_gpu();
  const Network got(want.c);

  std::vector<int32_t> slots(T);
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t r = 0; r < kTail; ++r) {
    const int64_t slot = want.slot_of(r);
    slots[static_cast<size_t>(T - kTail + r)] = slot < 0 ? -1 : static_cast<int32_t>(T - kTail + slot);
  }
  const Tensor<int32_t> slot_of_row({T}, slots);
  const Tensor<int32_t> sizes({2}, {static_cast<int32_t>(T - 200), 200});
  Mirrors mirrors;
  const auto view_of = [&](const DeviceBytes& bytes, int32_t dtype, std::initializer_list<int64_t> shape) {
    ab_tensor view{bytes.data(), dtype, static_cast<int32_t>(shape.size()), {}, nullptr};
    std::copy(shape.begin(), shape.end(), view.shape);
    return view;
  };
  const DeviceBytes x(T * D * 2), d_out(T * D * 2), rows(T * D * 2), h(T * 2 * F * 2), weights(T * 4), d_weights(T * 4);
  x.put_last(want.x.view());
  d_out.put_last(want.d_out.view());
  weights.put_last(want.weights.view());
  const ab_tensor x_view = view_of(x, AB_BFLOAT16, {T, D});
  const ab_tensor d_out_view = view_of(d_out, AB_BFLOAT16, {T, D});
  const ab_tensor rows_view = view_of(rows, AB_BFLOAT16, {T, D});  // y, then dx_rows
  const ab_tensor h_view = view_of(h, AB_BFLOAT16, {T, 2, F});     // h, then dh
  const ab_tensor weights_view = view_of(weights, AB_FLOAT32, {T, 1});
  const ab_tensor d_weights_view = view_of(d_weights, AB_FLOAT32, {T, 1});

  ab_expert_ffn_forward_args forward = want.forward_args();
  forward.x = &x_view;
  forward.slot_of_row = mirrors.add(slot_of_row.view());
  forward.group_sizes = mirrors.add(sizes.view());
  for (const auto member : {&ab_expert_ffn_forward_args::w_in, &ab_expert_ffn_forward_args::b_in,
                            &ab_expert_ffn_forward_args::w_out, &ab_expert_ffn_forward_args::b_out}) {
    forward.*member = mirrors.add(forward.*member);
  }
  forward.weights = &weights_view;
  forward.y = &rows_view;
  forward.h = &h_view;
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes));
  size_t backward_bytes = 0;
  ab_expert_ffn_backward_args backward = want.backward_args();
  backward.x = forward.x;
  backward.slot_of_row = forward.slot_of_row;
  backward.group_sizes = forward.group_sizes;
  backward.w_in = forward.w_in;
  backward.w_out = forward.w_out;
  backward.b_out = forward.b_out;
  backward.weights = forward.weights;
  backward.h = &h_view;
  backward.d_out = &d_out_view;
  backward.dh = &h_view;
  backward.dx_rows = &rows_view;
  backward.d_w_in = mirrors.add(got.d_w_in.view());
  backward.d_w_out = mirrors.add(got.d_w_out.view());
  backward.d_b_in = mirrors.add(got.d_b_in.view());
  backward.d_b_out = mirrors.add(got.d_b_out.view());
  backward.d_weights = &d_weights_view;
  EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&backward, nullptr, &backward_bytes));
  const DeviceBytes workspace(static_cast<int64_t>(std::max(bytes, backward_bytes)));
  const ab_exec exec{sizeof(ab_exec), 0, nullptr, workspace.data(), std::max(bytes, backward_bytes)};

  EXPECT_OK(ab_cuda_expert_ffn_forward(&forward, &exec));
  EXPECT_CUDA(cudaDeviceSynchronize());
  rows.get_last(got.y.view());
  h.get_last(got.h.view());
  EXPECT_TRUE(got.y.is(want.y));
  EXPECT_TRUE(got.h.is(want.h));

  h.put_last(want.saved_h.view());
  EXPECT_OK(ab_cuda_expert_ffn_backward(&backward, &exec));
  mirrors.fetch();
  rows.get_last(got.dx_rows.view());
  h.get_last(got.dh.view());
  d_weights.get_last(got.d_weights.view());
  EXPECT_TRUE(got.dx_rows.is(want.dx_rows));
  EXPECT_TRUE(got.dh.is(want.dh));
  // The split of these sums depends on R. The bound allows one more rounding, for terms of order 1.
  const auto expect_near = [](const char* name, const FloatTensor& result, const FloatTensor& expected,
                              float rounding) {
    for (int64_t i = 0; i < result.size(); ++i) {
      ASSERT_NEAR(result.get(i), expected.get(i), rounding * (std::abs(expected.get(i)) + 0x1p-10f))
          << name << " " << i;
    }
  };
  expect_near("d_weights", got.d_weights, want.d_weights, 0x1p-12f);
  expect_near("d_w_in", got.d_w_in, want.d_w_in, 0x1p-7f);
  expect_near("d_w_out", got.d_w_out, want.d_w_out, 0x1p-7f);
  expect_near("d_b_in", got.d_b_in, want.d_b_in, 0x1p-7f);
  expect_near("d_b_out", got.d_b_out, want.d_b_out, 0x1p-7f);
}

TEST_F(FfnCuda, ReplaysInAGraph) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    const FfnCase c{{3000, 0, 20, 1500}, 4600, 72, 136, 2, 2300, 2, dtype};
    const Network direct(c);
    direct.on_gpu();
    const Network replayed(c);
    Mirrors mirrors;
    ab_expert_ffn_forward_args forward = replayed.forward_args();
    using Forward = ab_expert_ffn_forward_args;
    for (const auto member : {&Forward::x, &Forward::slot_of_row, &Forward::group_sizes, &Forward::w_in, &Forward::b_in,
                              &Forward::w_out, &Forward::b_out, &Forward::weights, &Forward::y, &Forward::h}) {
      forward.*member = mirrors.add(forward.*member);
    }
    ab_expert_ffn_backward_args backward = replayed.backward_args();
    using Backward = ab_expert_ffn_backward_args;
    for (const auto member :
         {&Backward::x, &Backward::slot_of_row, &Backward::group_sizes, &Backward::w_in, &Backward::w_out,
          &Backward::b_out, &Backward::weights, &Backward::h, &Backward::d_out, &Backward::dh, &Backward::dx_rows,
          &Backward::d_w_in, &Backward::d_b_in, &Backward::d_w_out, &Backward::d_b_out, &Backward::d_weights}) {
      backward.*member = mirrors.add(backward.*member);
    }
    size_t bytes = 0;
    size_t more = 0;
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes));
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&backward, nullptr, &more));
    DeviceWorkspace workspace(std::max(bytes, more));  // the calls run one after the other
    replay_in_graph([&](cudaStream_t stream) {
      workspace.exec().stream = stream;
      EXPECT_OK(ab_cuda_expert_ffn_forward(&forward, &workspace.exec()));
      EXPECT_OK(ab_cuda_expert_ffn_backward(&backward, &workspace.exec()));
    });
    mirrors.fetch();
    workspace.check();
    replayed.expect_same_bits(direct);
  }
}

TEST(FfnWithoutCuda, BadArgumentsAreRefused) {
  const Network net({{2, 2}, 4, 8, 16, 2, 4, 2});
  size_t bytes = 0;
  ab_expert_ffn_forward_args forward = net.forward_args();
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  forward.activation = 11;
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "activation: got 11, expected");
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes), AB_INVALID_ARGUMENT,
                 "activation: got 11");
  ab_expert_ffn_backward_args backward = net.backward_args();
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  const FloatTensor odd({1, 1}, AB_BFLOAT16);
  backward.d_w_out = odd.view();
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT,
                 "d_w_out: got bfloat16 (7) [1, 1], expected bfloat16 or float32 [E=2, F=16, D=8]");
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward_workspace(&backward, nullptr, &bytes), AB_INVALID_ARGUMENT, "d_w_out");
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward(nullptr, nullptr), AB_INVALID_ARGUMENT, "args: got NULL");
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward(nullptr, nullptr), AB_INVALID_ARGUMENT, "args: got NULL");
}

// The workspace sizes that the header states.
TEST(FfnWithoutCuda, WorkspaceMatchesTheHeader) {
  const auto aligned = [](int64_t bytes) { return static_cast<size_t>((bytes + 63) / 64 * 64); };
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    const int64_t element = dtype == AB_FLOAT32 ? 4 : 2;
    const Network net({{200, 300}, 600, 13, 70, 2, 300, 2, dtype});
    size_t bytes = 0;
    const ab_expert_ffn_forward_args forward = net.forward_args();
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes));
    EXPECT_EQ(bytes, aligned(600 * 70 * element));
    ab_expert_ffn_backward_args args = net.backward_args();
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
    const FloatTensor x({600, 13}, dtype), dh({600, 140}, dtype), gradient({2, 13, 140}, dtype);
    // The GEMM that needs most.
    const ab_grouped_matmul_dw_args largest{
        sizeof(largest), 0, x.view(), dh.view(), args.group_sizes, gradient.view(), AB_PRECISION_HIGHEST, 0};
    size_t d_w_in = 0;
    EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace(&largest, nullptr, &d_w_in));
    EXPECT_EQ(bytes, aligned(600 * 70 * element) + aligned(static_cast<int64_t>(d_w_in)));  // w a, and dW_in
    const FloatTensor d_out({300, 13}, AB_FLOAT16);  // another dtype, which is converted first
    ab_expert_ffn_backward_args converting = args;
    converting.d_out = d_out.view();
    size_t more = 0;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&converting, nullptr, &more));
    EXPECT_EQ(more, bytes + aligned(300 * 13 * element));
    size_t bound = 0;
    constexpr int32_t kAll =
        AB_CUDA_NEED_WEIGHTED_A | AB_CUDA_NEED_D_WEIGHTS | AB_CUDA_NEED_D_W_OUT | AB_CUDA_NEED_D_W_IN;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace_bound(600, 2, 13, 2, 70, dtype, AB_FLOAT16, kAll, &bound));
    EXPECT_LE(more, bound);
    args.d_w_out = args.d_w_in = nullptr;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
    EXPECT_EQ(bytes, aligned(600 * 4));  // partial sums of d_weights over up to 128 columns
    args.d_weights = nullptr;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
    EXPECT_EQ(bytes, aligned((2 + 2) * 2 * 70 * 4));  // partial sums of d_b_in
    args.d_b_in = args.d_b_out = nullptr;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
    EXPECT_EQ(bytes, 0u);
    args.dh = nullptr;
    EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&args, nullptr, &bytes));
    EXPECT_EQ(bytes, aligned(600 * 2 * 70 * element));
  }
}

// Without a GPU, the calls return an error that names the reason.
TEST(FfnWithoutCuda, TheErrorNamesTheReason) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "a GPU is present";
  const Network net({{2, 2}, 4, 8, 16, 2, 4, 2});
  EXPECT_REFUSED(call(ab_cuda_expert_ffn_forward, ab_cuda_expert_ffn_forward_workspace, net.forward_args()),
                 AB_UNSUPPORTED, "expert_ffn_forward: no usable GPU");
  EXPECT_REFUSED(call(ab_cuda_expert_ffn_backward, ab_cuda_expert_ffn_backward_workspace, net.backward_args()),
                 AB_UNSUPPORTED, "expert_ffn_backward: no usable GPU");
}

}  // namespace
}  // namespace anabranch::testing
