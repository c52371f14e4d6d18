// Weight gradients of grouped GEMMs on the GPU against the CPU.
#include <cmath>
#include <limits>
#include <random>

#include "anabranch/cuda.h"
#include "anabranch/cuda_workspaces.h"
#include "core/cuda/divisor.h"
#include "experts_case.h"

namespace anabranch::testing {
namespace {

struct Case {
  std::vector<int32_t> sizes;
  int64_t R = 0;
  int64_t D = 0;
  int64_t N = 0;
  int32_t x = AB_BFLOAT16;  // dtypes
  int32_t d_y = AB_BFLOAT16;
  int32_t d_w = AB_BFLOAT16;
  bool accumulate = false;

  int64_t E() const { return static_cast<int64_t>(sizes.size()); }
};

struct GroupedMatmulDw {
  explicit GroupedMatmulDw(const Case& shape, unsigned seed = 1)
      : c(shape), x({c.R, c.D}, c.x), d_y({c.R, c.N}, c.d_y), sizes({c.E()}, c.sizes) {
    x.fill_uniform(seed);
    d_y.fill_uniform(seed + 1);
    // Fill rows past the groups with NaN to check that they are ignored.
    const int64_t end = c.sizes.empty() ? 0 : ends_of(c.sizes, c.R).back();
    for (int64_t i = end * c.D; i < c.R * c.D; ++i) x.set(i, std::numeric_limits<float>::quiet_NaN());
    for (int64_t i = end * c.N; i < c.R * c.N; ++i) d_y.set(i, std::numeric_limits<float>::quiet_NaN());
  }

  FloatTensor result() const { return {{c.E(), c.D, c.N}, c.d_w}; }
  // Sets the initial value for accumulation.
  void prepare(FloatTensor& d_w) const {
    if (c.accumulate) d_w.fill_uniform(7);
  }
  ab_grouped_matmul_dw_args args(const FloatTensor& d_w) const {
    return {sizeof(ab_grouped_matmul_dw_args),
            c.accumulate ? 1 : 0,
            x.view(),
            d_y.view(),
            sizes.view(),
            d_w.view(),
            AB_PRECISION_HIGHEST,
            0};
  }
  void on_cpu(const FloatTensor& d_w) const {
    EXPECT_OK(call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, args(d_w)));
  }
  void on_gpu(const FloatTensor& d_w) const {
    using Args = ab_grouped_matmul_dw_args;
    run_on_copies(ab_cuda_grouped_matmul_dw_workspace, ab_cuda_grouped_matmul_dw, args(d_w), &Args::x, &Args::d_y,
                  &Args::group_sizes, &Args::d_w);
  }

  Case c;
  FloatTensor x;
  FloatTensor d_y;
  Tensor<int32_t> sizes;
};

// Both backends round the same sum. The bound allows one rounding on each side and, for each float32 addition over the
// expert's rows, an error of 2^-21 relative to the typical magnitude of the sum, sqrt(rows + 1).
void compare(const Case& c, const FloatTensor& got, const FloatTensor& want) {
  const std::vector<int64_t> ends = ends_of(c.sizes, c.R);
  for (int64_t e = 0; e < c.E(); ++e) {
    const auto rows =
        static_cast<double>(ends[static_cast<size_t>(e)] - (e == 0 ? 0 : ends[static_cast<size_t>(e - 1)]));
    const double additions = rows * 0x1p-21 * std::sqrt(rows + 1);
    double error = 0;
    double norm = 0;
    for (int64_t i = e * c.D * c.N; i < (e + 1) * c.D * c.N; ++i) {
      const double difference = static_cast<double>(got.get(i)) - want.get(i);
      ASSERT_LE(std::abs(difference), 2 * rounding_of(c.d_w) * std::abs(want.get(i)) + additions)
          << "expert " << e << " row " << i / c.N % c.D << " column " << i % c.N << ": got " << got.get(i)
          << ", expected " << want.get(i);
      error += difference * difference;
      norm += static_cast<double>(want.get(i)) * want.get(i);
    }
    ASSERT_LE(std::sqrt(error), (2 * rounding_of(c.d_w) + 1e-6) * std::sqrt(norm)) << "expert " << e;
  }
}

void check(const Case& c, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << "R " << c.R << " E " << c.E() << " D " << c.D << " N " << c.N << " dtypes "
                                    << c.x << " " << c.d_y << " " << c.d_w << (c.accumulate ? " accumulated" : ""));
  const GroupedMatmulDw op(c, seed);
  FloatTensor want = op.result();
  op.prepare(want);
  op.on_cpu(want);
  FloatTensor got = op.result();
  op.prepare(got);
  op.on_gpu(got);
  if (::testing::Test::HasFatalFailure()) return;
  compare(c, got, want);
  if (::testing::Test::HasFatalFailure()) return;
  FloatTensor again = op.result();
  op.prepare(again);
  op.on_gpu(again);
  ASSERT_TRUE(got.is(again)) << "a second run gave other bits";
}

using WeightGradientCuda = ExpertsCudaTest;

TEST_F(WeightGradientCuda, MatchesTheCpu) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    for (const int32_t d_w : {dtype, int32_t{AB_FLOAT32}}) {
      check({kUneven, 1300, 256, 512, dtype, dtype, d_w});
      check({kUneven, 1217, 136, 264, dtype, dtype, d_w});
      check({kUneven, 1217, 8, 8, dtype, dtype, d_w});
      check({{300, 300, 300, 300}, 1200, 768, 768, dtype, dtype, d_w});
      check({{1}, 1, 1024, 2048, dtype, dtype, d_w});
      check({{5000, 0, 20, 1500}, 6600, 128, 264, dtype, dtype, d_w});  // sums that are split
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(WeightGradientCuda, AcceptsEverySizeAndDtype) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32}) {
    for (const int32_t other : {AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32}) {
      check({kUneven, 1300, 33, 45, dtype, other, AB_FLOAT32});
      check({kUneven, 1300, 64, 40, dtype, other, AB_BFLOAT16});
      check({{70, 0, 200}, 300, 64, 72, AB_BFLOAT16, dtype, other});
      if (HasFatalFailure()) return;
    }
    check({{1}, 1, 1, 1, dtype, dtype, dtype});
    check({{0, 0}, 4, 3, 2, dtype, dtype, dtype});
    check({{2}, 0, 3, 2, dtype, dtype, dtype});
    check({{2}, 0, 8, 8, dtype, dtype, dtype});
    check({{2, 3}, 6, 0, 16, dtype, dtype, dtype});
    check({{2, 3}, 6, 16, 0, dtype, dtype, dtype});
    check({{}, 6, 16, 16, dtype, dtype, dtype});
    if (HasFatalFailure()) return;
  }
}

TEST_F(WeightGradientCuda, Accumulates) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32}) {
    check({kUneven, 1300, 256, 512, dtype, dtype, AB_FLOAT32, true});
    check({{5000, 0, 20, 1500}, 6600, 128, 264, dtype, dtype, AB_FLOAT32, true});
    check({kUneven, 1300, 33, 45, dtype, dtype, AB_FLOAT32, true});
    if (HasFatalFailure()) return;
  }
}

TEST_F(WeightGradientCuda, GroupSizesAreClippedToTheRows) {
  for (const int64_t D : {64, 33}) {
    check({{-5, 3, INT32_MIN, 4, -1}, 6, D, 72});
    check({{2, INT32_MAX, INT32_MAX, 1}, 700, D, 72});
    check({{INT32_MAX, -1, INT32_MAX}, 3000, D, 72});
    if (HasFatalFailure()) return;
  }
}

TEST_F(WeightGradientCuda, ReplaysInAGraph) {
  const GroupedMatmulDw op({{3000, 0, 20, 1500}, 4600, 128, 264});
  const FloatTensor direct = op.result();
  op.on_gpu(direct);
  const FloatTensor replayed = op.result();
  ab_grouped_matmul_dw_args args = op.args(replayed);
  Mirrors mirrors;
  for (const ab_tensor** tensor : {&args.x, &args.d_y, &args.group_sizes, &args.d_w}) *tensor = mirrors.add(*tensor);
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace(&args, nullptr, &bytes));
  DeviceWorkspace workspace(bytes);
  replay_in_graph([&](cudaStream_t stream) {
    workspace.exec().stream = stream;
    EXPECT_OK(ab_cuda_grouped_matmul_dw(&args, &workspace.exec()));
    EXPECT_OK(ab_cuda_grouped_matmul_dw(&args, &workspace.exec()));
  });
  mirrors.fetch();
  EXPECT_TRUE(replayed.is(direct));
}

TEST_F(WeightGradientCuda, BadArgumentsAreRefused) {
  const GroupedMatmulDw op({{3000}, 3000, 64, 64});
  const FloatTensor d_w = op.result();
  ab_grouped_matmul_dw_args args = op.args(d_w);
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace(&args, nullptr, &bytes));
  EXPECT_GT(bytes, 0u);
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes, expected");
  const FloatTensor wrong({1, 64, 65}, AB_BFLOAT16);
  args.d_w = wrong.view();
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw(&args, nullptr), AB_INVALID_ARGUMENT, "d_w: got bfloat16 (7) [1, 64, 65]");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw_workspace(nullptr, nullptr, &bytes), AB_INVALID_ARGUMENT,
                 "ab_grouped_matmul_dw_args: got NULL");
}

// Without a GPU, the call returns an error that names the reason.
TEST(WeightGradientWithoutCuda, TheErrorNamesTheReason) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "a GPU is present";
  const GroupedMatmulDw gradient({{2, 2}, 4, 5, 6});
  const FloatTensor d_w = gradient.result();
  const ab_grouped_matmul_dw_args gradient_args = gradient.args(d_w);
  EXPECT_REFUSED(call(ab_cuda_grouped_matmul_dw, ab_cuda_grouped_matmul_dw_workspace, gradient_args), AB_UNSUPPORTED,
                 "grouped_matmul_dw: no usable GPU");
}

TEST(WeightGradientWithoutCuda, DivisorsAreExact) {
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) {
    const int32_t power = 1 << random() % 31;
    const int32_t divisors[] = {i + 1, power, power == 1 ? 1 : power - 1,
                                static_cast<int32_t>(random() % INT32_MAX) + 1, INT32_MAX};
    for (const int32_t d : divisors) {
      const cuda::Divisor divisor(d);
      const auto multiple = static_cast<int32_t>(static_cast<int64_t>(random()) % (INT32_MAX / d + 1)) * d;
      for (const int32_t n : {0, d - 1, d, multiple, multiple == 0 ? 0 : multiple - 1, INT32_MAX - 1, INT32_MAX}) {
        ASSERT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
      }
    }
  }
}

// The workspace depends on shapes and dtypes only, and is bounded.
TEST(WeightGradientWithoutCuda, WorkspaceIsBounded) {
  const auto bytes_for = [](const Case& c) {
    const ab_tensor x{nullptr, c.x, 2, {c.R, c.D}, nullptr};
    const ab_tensor d_y{nullptr, c.d_y, 2, {c.R, c.N}, nullptr};
    const ab_tensor sizes{nullptr, AB_INT32, 1, {c.E()}, nullptr};
    const ab_tensor d_w{nullptr, c.d_w, 3, {c.E(), c.D, c.N}, nullptr};
    // Only the sizes matter, but views must not be null.
    static char memory[64];
    ab_tensor views[] = {x, d_y, sizes, d_w};
    for (ab_tensor& view : views) view.data = memory;
    const ab_grouped_matmul_dw_args args{sizeof(args),         0, &views[0], &views[1], &views[2], &views[3],
                                         AB_PRECISION_HIGHEST, 0};
    size_t bytes = 0;
    EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace(&args, nullptr, &bytes));
    return bytes;
  };
  const std::vector<int32_t> sizes(128);
  for (const int64_t R : {1, 1000, 262144, 1 << 30}) {
    for (const int64_t D : {8, 768, 4096, 65536}) {
      for (const int64_t N : {64, 512, 7168}) {
        EXPECT_LE(bytes_for({sizes, R, D, N}), (size_t{144} << 20) + 16 * 128) << R << " " << D << " " << N;
      }
    }
  }
  EXPECT_EQ(bytes_for({sizes, 262144, 768, 512, AB_FLOAT32, AB_FLOAT32, AB_FLOAT32}),
            bytes_for({sizes, 262144, 768, 512}));
  EXPECT_LE(bytes_for({sizes, 262144, 767, 513}), (size_t{144} << 20) + 16 * 128);
  // d_y and d_w are converted to float32.
  const size_t float32_bytes = bytes_for({sizes, 262144, 768, 512});
  EXPECT_EQ(bytes_for({sizes, 262144, 768, 512, AB_FLOAT32, AB_BFLOAT16, AB_FLOAT32}),
            float32_bytes + 262144 * 512 * 4);
  size_t bound = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace_bound(262144, 128, 768, 512, AB_FLOAT16, AB_BFLOAT16, &bound));
  EXPECT_GE(bound, bytes_for({sizes, 262144, 768, 512, AB_FLOAT16, AB_BFLOAT16, AB_FLOAT16}));
  EXPECT_EQ(bytes_for({sizes, 262144, 768, 512, AB_BFLOAT16, AB_BFLOAT16, AB_FLOAT16}),
            float32_bytes + 128 * 768 * 512 * 4);
  EXPECT_EQ(bytes_for({{}, 262144, 768, 512}), 0u);
}

}  // namespace
}  // namespace anabranch::testing
