// Low-rank adapters on the GPU against the CPU.
#include "anabranch/cuda_workspaces.h"
#include "lora_case.h"

namespace anabranch::testing {
namespace {

using LoraCuda = ExpertsCudaTest;
using LoraFp8Cuda = HopperTest;

const std::vector<int32_t> kGroups = {3, 0, 34, 1, 0, 9};  // 47 rows

LoraCase small_case(int32_t dtype, bool aligned, int64_t P = 2) {
  FfnCase c{kGroups, 50, aligned ? 32 : 13, aligned ? 40 : 7, P};
  c.T = 21;
  c.K = 3;
  c.dtype = dtype;
  return {.c = c, .r = aligned ? 16 : 5, .q = aligned ? 8 : 3};
}

LoraCase fp8_case(int32_t dtype) {
  LoraCase l{.c = {kGroups, 50, 256, 128, 2, 21, 3, dtype}, .r = 16, .q = 8};
  l.c.precision = AB_PRECISION_FP8;
  return l;
}

// Sets options by the seed. With consecutive seeds each occurs with every dtype, and most pairs occur.
void rotate_options(unsigned seed, int layout, LoraCase* l) {
  if (seed % 4 == 3) l->c.T = l->c.K = 0;
  l->c.layout = layout;
  l->c.activation = l->c.P == 2 ? AB_SWIGLU_OAI : AB_GELU;
  l->c.weighting = static_cast<Weighting>(seed % 3);
  l->c.biases = seed % 2 == 0;
  l->c.accumulate = seed % 7 == 0;
  l->dtype = l->c.accumulate || seed % 3 == 1 ? AB_FLOAT32 : 0;
  l->order = static_cast<int>(seed % 3);
  l->shared = seed * 5 % 16;
  l->frozen = seed % 6 != 0;
  l->saves_u = seed % 4 != 0;
}

TEST_F(LoraCuda, EveryOptionMatchesTheCpu) {
  unsigned seed = 0;
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
      if (++seed % 2 == 0 && dtype == AB_FLOAT16) continue;
      LoraCase l = small_case(dtype, seed / 2 % 2 == 0, seed % 5 == 0 ? 1 : 2);
      rotate_options(seed, layout, &l);
      check(l, seed);
      if (HasFatalFailure()) return;
    }
  }
}

// Ranks below and above a k-block and a tile, of one projection or both.
TEST_F(LoraCuda, AnyRank) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const auto& [r, q] : {std::pair<int64_t, int64_t>{1, 0}, {0, 1}, {70, 33}, {0, 130}}) {
      LoraCase l = small_case(dtype, dtype == AB_BFLOAT16);
      l.r = r;
      l.q = q;
      check(l);
      if (HasFatalFailure()) return;
    }
  }
}

// Multiples of a k-block, with and without a rest.
TEST_F(LoraCuda, WholeBlocksOfTheRank) {
  for (const auto& [r, q] : {std::pair<int64_t, int64_t>{64, 72}, {128, 64}}) {
    LoraCase l = small_case(AB_BFLOAT16, true);
    l.r = r;
    l.q = q;
    check(l);
    if (HasFatalFailure()) return;
  }
}

// The kernels for few rows, which need weights with the contraction innermost.
TEST_F(LoraCuda, FewRows) {
  unsigned seed = 0;
  for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
    for (const int64_t r : {16, 40}) {
      FfnCase c{{1, 0, 2, 3, 0, 1}, 8, 32, 40, ++seed % 3 == 0 ? 1 : 2, 4, 2};
      c.dtype = seed % 2 == 0 ? AB_BFLOAT16 : AB_FLOAT16;
      c.layout = layout;
      c.activation = c.P == 2 ? AB_SWIGLU_OAI : AB_GELU;
      c.weighting = static_cast<Weighting>(seed % 3);
      c.biases = seed % 2 == 0;
      check({.c = c, .r = r, .q = 8, .shared = seed * 5 % 16}, seed);
      if (HasFatalFailure()) return;
    }
  }
}

// Runs the network with each order of the copies of factors. The results have the bits of those without copies.
// check(network, case) is called for each.
template <class Check>
void expect_bits_without_copies(LoraCase l, const Check& check) {
  const LoraNetwork without(l);
  without.on_gpu();
  for (l.copies = 1; l.copies <= 4; ++l.copies) {
    SCOPED_TRACE(::testing::Message() << l);
    const LoraNetwork with(l);
    with.on_gpu();
    with.expect_same_bits(without);
    check(with, l);
  }
}

// The backward pass reads the copies that the forward pass made, in every order of their axes.
TEST_F(LoraCuda, CopiesOfFactors) {
  unsigned seed = 0;
  for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
    LoraCase l = small_case(layout % 2 == 0 ? AB_BFLOAT16 : AB_FLOAT16, true);
    l.c.layout = layout;
    l.dtype = AB_FLOAT32;
    l.order = layout % 3;
    l.shared = ++seed * 5 % 16;
    expect_bits_without_copies(l, [&](const LoraNetwork& with, const LoraCase& l) {
      const LoraNetwork cpu(l);
      cpu.on_cpu();
      for (int i = 0; i < 4; ++i) EXPECT_TRUE(with.factors[i]->copy.is(cpu.factors[i]->copy)) << i;
    });
    l.copies = 1 + layout % 4;
    check(l);
    if (HasFatalFailure()) return;
  }
}

// Shared factors have gradients, which are zero, without any expert.
TEST_F(LoraCuda, SharedFactorsWithoutExperts) {
  LoraCase l = small_case(AB_BFLOAT16, true);
  l.c.sizes = {};
  l.shared = 15;
  check(l);
}

TEST_F(LoraCuda, Tf32IsCloseToTheCpu) {
  LoraCase l = small_case(AB_FLOAT32, true);
  l.c.precision = AB_PRECISION_TF32;
  check(l);
}

// Several tiles in each direction, and sums of several segments in the gradients.
TEST_F(LoraCuda, LargeSizesMatchTheCpu) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const unsigned shared : {0u, 15u}) {
      LoraCase l{.c = {kUneven, 1300, 264, 200, 2, 500, 3, dtype}, .r = 40, .q = 24, .shared = shared};
      check(l);
      if (HasFatalFailure()) return;
    }
  }
}

// v_in and dB_in read the same rows, as do z and dA_out. Hopper computes each pair in one kernel if both are requested;
// the gradients then have the bits that they have alone.
TEST_F(LoraCuda, LargeGroupsWithPairsOfGemms) {
  unsigned seed = 0;
  for (const auto& [r, q] : {std::pair<int64_t, int64_t>{8, 64}, {16, 40}, {64, 8}}) {
    for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
      FfnCase c{{600, 0, 64, 301, 1, 130}, 1150, 264, layout % 2 == 0 ? 200 : 328, 2, 380, 3};
      c.dtype = ++seed % 2 == 0 ? AB_BFLOAT16 : AB_FLOAT16;
      c.layout = layout;
      c.accumulate = seed % 5 == 0;
      const LoraCase l{.c = c, .r = r, .q = q, .dtype = seed % 3 == 0 || c.accumulate ? AB_FLOAT32 : 0};
      check(l, seed);
      if (HasFatalFailure()) return;
      SCOPED_TRACE(::testing::Message() << l);
      const LoraNetwork paired(l, seed);
      paired.on_gpu();
      const LoraNetwork alone(l, seed);
      Network::forward_on_gpu(alone.forward_args());
      ab_expert_ffn_backward_args args = alone.backward_args();
      args.dx_rows = args.lora_v_in = args.d_lora_a_in = args.d_lora_b_out = nullptr;
      Network::backward_on_gpu(args);
      EXPECT_TRUE(alone.factors[1]->gradient.is(paired.factors[1]->gradient)) << "d_lora_b_in";
      EXPECT_TRUE(alone.factors[2]->gradient.is(paired.factors[2]->gradient)) << "d_lora_a_out";
    }
  }
}

// A NaN of one expert's factor stays in the rows of its group.
TEST_F(LoraCuda, LargeGroupsKeepNanApart) {
  FfnCase c{{300, 70, 0, 129}, 520, 264, 328, 2, 250, 2, AB_BFLOAT16};
  LoraNetwork net({.c = c, .r = 16, .q = 16});
  for (const int factor : {1, 2}) {
    net.factors[factor]->values.set(0, std::numeric_limits<float>::quiet_NaN());  // of expert 0
  }
  net.on_gpu();
  for (int64_t row = 0; row < c.R; ++row) {
    if (row < 300 && net.net.slot_of(row) >= 0) continue;
    for (int64_t i = 0; i < net.l.r; ++i) ASSERT_FALSE(std::isnan(net.v_in.get(row * net.l.r + i))) << row;
  }
}

TEST_F(LoraCuda, EmptySizes) {
  for (const auto& [R, D, F] : {std::tuple<int64_t, int64_t, int64_t>{0, 8, 8}, {50, 0, 8}, {50, 8, 0}}) {
    for (const unsigned shared : {0u, 15u}) {
      LoraCase l = small_case(AB_BFLOAT16, true);
      l.c.R = R;
      l.c.D = D;
      l.c.F = F;
      l.shared = shared;
      check(l);
      if (HasFatalFailure()) return;
    }
  }
}

// The kernels of float32 are the same with an adapter and without.
TEST_F(LoraCuda, ZeroFactorsGiveTheBitsWithoutAnAdapter) {
  LoraCase l = small_case(AB_FLOAT32, true);
  LoraNetwork with(l);
  for (const int b : {1, 3}) {
    for (int64_t i = 0; i < with.factors[b]->values.size(); ++i) with.factors[b]->values.set(i, 0.0f);
  }
  with.on_gpu();
  l.r = l.q = 0;
  const LoraNetwork without(l);
  without.on_gpu();
  const auto expect_equal = [](const FloatTensor& got, const FloatTensor& want) {  // -0 equals +0
    for (int64_t i = 0; i < got.size(); ++i) ASSERT_EQ(got.get(i), want.get(i)) << i;
  };
  expect_equal(with.net.y, without.net.y);
  expect_equal(with.net.h, without.net.h);
  expect_equal(with.net.dx_rows, without.net.dx_rows);
}

// A first call computes dh, w a, v_in and v_out; later calls compute the gradients from them, or compute v again.
TEST_F(LoraCuda, SplitCallsMatchOne) {
  for (const bool gives_v : {true, false}) {
    LoraCase l = small_case(AB_BFLOAT16, true);
    l.shared = 6;
    const LoraNetwork one(l);
    one.on_gpu();
    const LoraNetwork two(l);
    Network::forward_on_gpu(two.forward_args());
    const FloatTensor weighted_a({l.c.R, l.c.F}, l.c.dtype);
    const ab_expert_ffn_backward_args all = two.backward_args();
    ab_expert_ffn_backward_args first = all;
    first.weighted_a = weighted_a.view();
    first.dx_rows = first.d_lora_a_in = first.d_lora_b_in = first.d_lora_a_out = first.d_lora_b_out = nullptr;
    Network::backward_on_gpu(first);
    ab_expert_ffn_backward_args out = all;
    out.h = out.d_weights = out.dx_rows = out.dh = out.lora_v_in = nullptr;
    out.weighted_a = weighted_a.view();
    out.d_lora_a_in = out.d_lora_b_in = nullptr;
    ab_expert_ffn_backward_args in = all;
    in.h = in.d_weights = in.d_out = in.lora_v_out = in.d_lora_a_out = in.d_lora_b_out = nullptr;
    if (!gives_v) out.lora_v_out = in.lora_v_in = nullptr;
    Network::backward_on_gpu(out);
    Network::backward_on_gpu(in);
    two.expect_same_bits(one);
  }
}

// y = x w + scale (x A) B, its gradient by the transposed factors, and sums per token of both.
class GroupedLora {
 public:
  GroupedLora(int32_t dtype, bool transposed, bool shared, int32_t precision = AB_PRECISION_HIGHEST, int64_t rank = 5)
      : dtype_(dtype),
        transposed_(transposed),
        precision_(precision),
        D_(precision == AB_PRECISION_FP8 ? 128 : 40),
        N_(precision == AB_PRECISION_FP8 ? 384 : 200),
        rank_(rank),
        sizes_({E()}, kGroups),
        slots_({kR}),
        rows_({kT, kK}),
        x_({kR, D_}, dtype),
        w_(transposed ? std::vector<int64_t>{E(), N_, D_} : std::vector<int64_t>{E(), D_, N_}, dtype),
        a_({shared ? 1 : E(), rank_, D_}, AB_FLOAT32),
        b_({E(), rank_, N_}, dtype),
        bias_({E(), N_}, dtype),
        weights_({kT, kK}, AB_FLOAT32),
        a_view_(*a_.view()) {
    for (FloatTensor* tensor : {&x_, &w_, &a_, &b_, &bias_, &weights_}) tensor->fill_uniform(++seed_);
    for (int32_t r = 0; r < kR; ++r) {
      slots_[r] = r % 11 == 5 ? -1 : r;
      if (slots_[r] >= 0) rows_[r] = r;
    }
    // A [E, D, rank], stored transposed.
    std::swap(a_view_.shape[1], a_view_.shape[2]);
    strides_[0] = D_ * rank_;
    strides_[1] = 1;
    strides_[2] = D_;
    a_view_.strides = strides_;
  }

  struct Results {
    FloatTensor y, u;
    Results(std::vector<int64_t> shape, int64_t rank, int32_t dtype)
        : y(std::move(shape), dtype), u({kR, rank}, dtype) {}
  };

  ab_grouped_matmul_args args(const Results& results) const {
    ab_grouped_matmul_args args{};
    args.size = sizeof(args);
    args.transpose_w = transposed_ ? 1 : 0;
    args.precision = precision_;
    args.x = x_.view();
    args.w = w_.view();
    args.group_sizes = sizes_.view();
    args.y = results.y.view();
    args.lora_scale = 0.5f;
    args.lora_a = &a_view_;
    args.lora_b = b_.view();
    args.lora_u = results.u.view();
    return args;
  }
  ab_grouped_matmul_combine_args combine_args(const Results& results, bool gives_u) const {
    ab_grouped_matmul_combine_args args{};
    args.size = sizeof(args);
    args.transpose_w = transposed_ ? 1 : 0;
    args.precision = precision_;
    args.x = x_.view();
    args.w = w_.view();
    args.group_sizes = sizes_.view();
    args.bias = bias_.view();
    args.slot_of_row = slots_.view();
    args.row_of_slot = rows_.view();
    args.weights = weights_.view();
    args.out = results.y.view();
    args.lora_scale = gives_u ? 0.0f : 0.5f;
    args.lora_a = gives_u ? nullptr : &a_view_;
    args.lora_b = b_.view();
    args.lora_u = results.u.view();
    return args;
  }

  void check_product() const {
    const Results want({kR, N_}, rank_, dtype_), got({kR, N_}, rank_, dtype_);
    EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args(want)));
    using A = ab_grouped_matmul_args;
    run_on_copies(ab_cuda_grouped_matmul_workspace, ab_cuda_grouped_matmul, args(got), &A::x, &A::w, &A::group_sizes,
                  &A::y, &A::lora_a, &A::lora_b, &A::lora_u);
    compare(got, want);
  }
  void check_combine() const {
    const Results want({kT, N_}, rank_, dtype_), got({kT, N_}, rank_, dtype_);
    EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, combine_args(want, false)));
    combine_on_gpu(combine_args(got, false));
    compare(got, want);
    const Results again({kT, N_}, rank_, dtype_);
    for (int64_t i = 0; i < got.u.size(); ++i) const_cast<FloatTensor&>(again.u).set(i, got.u.get(i));
    combine_on_gpu(combine_args(again, true));
    EXPECT_TRUE(again.y.is(got.y)) << "with a given u";
  }

 private:
  static constexpr int64_t kR = 50, kT = 25, kK = 2;
  static int64_t E() { return static_cast<int64_t>(kGroups.size()); }

  static void combine_on_gpu(const ab_grouped_matmul_combine_args& args) {
    using A = ab_grouped_matmul_combine_args;
    run_on_copies(ab_cuda_grouped_matmul_combine_workspace, ab_cuda_grouped_matmul_combine, args, &A::x, &A::w,
                  &A::group_sizes, &A::bias, &A::slot_of_row, &A::row_of_slot, &A::weights, &A::out, &A::lora_a,
                  &A::lora_b, &A::lora_u);
  }

  void compare(const Results& got, const Results& want) const {
    FfnCase c;
    c.dtype = dtype_;
    c.precision = precision_;
    compare_elements("y", c, got.y, want.y, 0, want.y.size());
    compare_elements("u", c, got.u, want.u, 0, want.u.size());
  }

  int32_t dtype_;
  bool transposed_;
  int32_t precision_;
  int64_t D_, N_, rank_;
  unsigned seed_ = 0;
  Tensor<int32_t> sizes_, slots_, rows_;
  FloatTensor x_, w_, a_, b_, bias_, weights_;
  ab_tensor a_view_;
  int64_t strides_[AB_MAX_RANK] = {};
};

TEST_F(LoraCuda, GroupedGemmsMatchTheCpu) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const bool transposed : {false, true}) {
      const GroupedLora gemm(dtype, transposed, transposed);
      gemm.check_product();
      gemm.check_combine();
      if (HasFatalFailure()) return;
    }
  }
}

// d_w [1, D, N] is the sum over all experts, in any dtype.
TEST_F(LoraCuda, SharedWeightGradientsMatchTheCpu) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    FloatTensor x({50, 13}, AB_BFLOAT16), d_y({50, 9}, dtype);
    x.fill_uniform(1);
    d_y.fill_uniform(2);
    const Tensor<int32_t> sizes({6}, kGroups);
    FloatTensor want({1, 13, 9}, dtype), got({1, 13, 9}, dtype);
    ab_grouped_matmul_dw_args args{};
    args.size = sizeof(args);
    args.accumulate = dtype == AB_FLOAT32 ? 1 : 0;
    args.x = x.view();
    args.d_y = d_y.view();
    args.group_sizes = sizes.view();
    for (FloatTensor* d_w : {&want, &got}) d_w->fill_uniform(3);
    args.d_w = want.view();
    EXPECT_OK(call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, args));
    args.d_w = got.view();
    using A = ab_grouped_matmul_dw_args;
    run_on_copies(ab_cuda_grouped_matmul_dw_workspace, ab_cuda_grouped_matmul_dw, args, &A::x, &A::d_y, &A::group_sizes,
                  &A::d_w);
    FfnCase c;
    c.dtype = dtype;
    compare_elements("d_w", c, got, want, 0, want.size());
    if (HasFatalFailure()) return;
  }
}

// The bounds that JAX passes on, without u, z and v, and with factors that are copied.
TEST(LoraWorkspaces, AreWithinTheBounds) {
  for (const bool aligned : {true, false}) {
    for (const unsigned shared : {0u, 15u}) {
      LoraCase l = small_case(AB_BFLOAT16, aligned);
      l.shared = shared;
      l.dtype = AB_FLOAT32;
      l.c.layout = 2;  // gate and up alternate
      l.c.R = 4000;
      l.c.T = 2000;
      const LoraNetwork network(l);
      const FfnCase& c = l.c;
      const auto bound = [&](int32_t backward) {
        size_t in = 0;
        size_t out = 0;
        EXPECT_OK(ab_cuda_lora_workspace_bound(c.R, c.E(), c.D, c.P * c.F, l.r, backward, c.dtype, &in));
        EXPECT_OK(ab_cuda_lora_workspace_bound(c.R, c.E(), c.F, c.D, l.q, backward, c.dtype, &out));
        return in + out;
      };
      size_t bytes = 0;
      size_t without = 0;
      ab_expert_ffn_forward_args forward = network.forward_args();
      forward.lora_u = forward.lora_z = nullptr;
      EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&forward, nullptr, &bytes));
      EXPECT_OK(ab_cuda_expert_ffn_forward_workspace_bound(c.R, c.F, c.dtype, &without));
      EXPECT_GT(bytes, without);
      EXPECT_LE(bytes, without + bound(0));
      ab_expert_ffn_backward_args backward = network.backward_args();
      backward.lora_u = backward.lora_v_in = backward.lora_v_out = nullptr;
      EXPECT_OK(ab_cuda_expert_ffn_backward_workspace(&backward, nullptr, &bytes));
      EXPECT_OK(ab_cuda_expert_ffn_backward_workspace_bound(
          c.R, c.E(), c.D, c.P, c.F, c.dtype, c.dtype, AB_CUDA_NEED_WEIGHTED_A | AB_CUDA_NEED_D_WEIGHTS, &without));
      EXPECT_GT(bytes, without);
      EXPECT_LE(bytes, without + bound(1));
    }
  }
}

// With FP8 `a` is also stored in 16 bits, and ranks that are no multiple of 8 have padded copies.
TEST(LoraWorkspaces, AreWithinTheBoundsWithFp8) {
  const auto bytes_of = [](const LoraCase& l) {
    const LoraNetwork network(l);
    ab_expert_ffn_forward_args args = network.forward_args();
    args.lora_u = args.lora_z = nullptr;
    size_t bytes = 0;
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&args, nullptr, &bytes));
    return bytes;
  };
  for (const int64_t rank : {5, 16}) {
    LoraCase l = fp8_case(AB_BFLOAT16);
    l.dtype = AB_FLOAT32;
    l.r = l.q = rank;
    const FfnCase& c = l.c;
    size_t in = 0;
    size_t out = 0;
    size_t a = 0;
    EXPECT_OK(ab_cuda_lora_workspace_bound(c.R, c.E(), c.D, c.P * c.F, rank, 0, c.dtype, &in));
    EXPECT_OK(ab_cuda_lora_workspace_bound(c.R, c.E(), c.F, c.D, rank, 0, c.dtype, &out));
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace_bound(c.R, c.F, c.dtype, &a));
    const size_t with = bytes_of(l);
    l.r = l.q = 0;
    const size_t without = bytes_of(l);
    EXPECT_GT(with, without + a);
    EXPECT_LE(with, without + in + out + a);
  }
}

// GEMMs with W have e4m3 operands, those with factors 16-bit ones.
TEST_F(LoraFp8Cuda, EveryOptionMatchesTheCpu) {
  unsigned seed = 0;
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
      LoraCase l = fp8_case(dtype);
      ++seed;
      if (seed % 5 == 0) l.c.P = 1;
      rotate_options(seed, layout, &l);
      check(l, seed);
      if (HasFatalFailure()) return;
    }
  }
}

// One projection or both; ranks below and above a k-block, and ranks that are no multiple of 8.
TEST_F(LoraFp8Cuda, CopiesOfFactors) {
  for (const int layout : {0, 2, 3}) {
    LoraCase l = fp8_case(AB_BFLOAT16);
    l.c.layout = layout;
    l.dtype = AB_FLOAT32;
    expect_bits_without_copies(l, [](const LoraNetwork&, const LoraCase&) {});
  }
}

TEST_F(LoraFp8Cuda, AnyRank) {
  unsigned seed = 0;
  for (const auto& [r, q] : {std::pair<int64_t, int64_t>{64, 72}, {128, 0}, {0, 40}, {4, 70}, {13, 0}, {0, 5}}) {
    LoraCase l = fp8_case(AB_BFLOAT16);
    l.r = r;
    l.q = q;
    l.shared = ++seed * 5 % 16;
    check(l, seed);
    if (HasFatalFailure()) return;
  }
}

// Several tiles in each direction.
TEST_F(LoraFp8Cuda, LargeSizesMatchTheCpu) {
  LoraCase l = fp8_case(AB_BFLOAT16);
  l.c.sizes = kUneven;
  l.c.R = 1300;
  l.c.T = 500;
  l.c.D = 512;
  l.c.F = 384;
  check(l);
}

TEST_F(LoraFp8Cuda, GroupedGemmsMatchTheCpu) {
  for (const bool transposed : {false, true}) {
    for (const int64_t rank : {16, 5}) {
      const GroupedLora gemm(AB_BFLOAT16, transposed, transposed, AB_PRECISION_FP8, rank);
      gemm.check_product();
      gemm.check_combine();
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
