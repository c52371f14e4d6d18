// Grouped GEMMs on the GPU against the CPU.
#include <cmath>
#include <limits>
#include <ostream>
#include <random>

#include "anabranch/cuda.h"
#include "experts_case.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

struct Case {
  std::vector<int32_t> sizes;
  int64_t R = 0;
  int64_t D = 0;
  int64_t N = 0;
  bool transpose = false;
  int32_t dtype = AB_BFLOAT16;

  int64_t E() const { return static_cast<int64_t>(sizes.size()); }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "R " << c.R << " E " << c.E() << " D " << c.D << " N " << c.N << (c.transpose ? " transposed" : "")
             << " dtype " << c.dtype;
}

struct GroupedMatmul {
  explicit GroupedMatmul(const Case& shape, unsigned seed = 1)
      : c(shape),
        x({c.R, c.D}, c.dtype),
        w(c.transpose ? std::vector<int64_t>{c.E(), c.N, c.D} : std::vector<int64_t>{c.E(), c.D, c.N}, c.dtype),
        sizes({c.E()}, c.sizes) {
    x.fill_uniform(seed);
    w.fill_uniform(seed + 1);
    // Fill rows past the groups with NaN to check that they are ignored.
    const int64_t end = c.sizes.empty() ? 0 : ends_of(c.sizes, c.R).back();
    for (int64_t i = end * c.D; i < c.R * c.D; ++i) x.set(i, std::numeric_limits<float>::quiet_NaN());
  }

  ab_grouped_matmul_args args(const FloatTensor& y) const {
    return grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view(), c.transpose ? 1 : 0);
  }
  void on_cpu(const FloatTensor& y) const { EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args(y))); }
  void on_gpu(const FloatTensor& y) const {
    using Args = ab_grouped_matmul_args;
    run_on_copies(ab_cuda_grouped_matmul_workspace, ab_cuda_grouped_matmul, args(y), &Args::x, &Args::w,
                  &Args::group_sizes, &Args::y);
  }

  Case c;
  FloatTensor x;
  FloatTensor w;
  Tensor<int32_t> sizes;
};

// Both backends round the same sum. The bound allows one rounding on each side and, for each of the D float32
// additions, an error of 2^-21 relative to the typical magnitude of the sum, sqrt(D + 1).
void compare(const Case& c, const FloatTensor& got, const FloatTensor& want) {
  const std::vector<int64_t> ends = ends_of(c.sizes, c.R);
  const double additions = static_cast<double>(c.D) * 0x1p-21 * std::sqrt(static_cast<double>(c.D) + 1);
  int64_t row = 0;
  for (size_t e = 0; e < ends.size(); ++e) {
    double error = 0;
    double norm = 0;
    for (int64_t i = row * c.N; i < ends[e] * c.N; ++i) {
      const double difference = static_cast<double>(got.get(i)) - want.get(i);
      ASSERT_LE(std::abs(difference), 2 * rounding_of(c.dtype) * std::abs(want.get(i)) + additions)
          << "expert " << e << " row " << i / c.N << " column " << i % c.N << ": got " << got.get(i) << ", expected "
          << want.get(i);
      error += difference * difference;
      norm += static_cast<double>(want.get(i)) * want.get(i);
    }
    ASSERT_LE(std::sqrt(error), (2 * rounding_of(c.dtype) + 1e-6) * std::sqrt(norm)) << "expert " << e;
    row = ends[e];
  }
  for (int64_t i = row * c.N; i < c.R * c.N; ++i) ASSERT_EQ(got.get(i), 0.0f) << "row past the groups " << i / c.N;
}

void check(const Case& c, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << c);
  const GroupedMatmul op(c, seed);
  const FloatTensor want({c.R, c.N}, c.dtype);
  op.on_cpu(want);
  const FloatTensor got({c.R, c.N}, c.dtype);
  op.on_gpu(got);
  if (::testing::Test::HasFatalFailure()) return;
  compare(c, got, want);
  if (::testing::Test::HasFatalFailure()) return;
  const FloatTensor again({c.R, c.N}, c.dtype);
  op.on_gpu(again);
  ASSERT_TRUE(got.is(again)) << "a second run gave other bits";
}

using ExpertsCuda = ExpertsCudaTest;

TEST_F(ExpertsCuda, GroupedMatmulMatchesTheCpu) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    for (const bool transpose : {false, true}) {
      check({kUneven, 1300, 256, 512, transpose, dtype});
      check({kUneven, 1217, 136, 264, transpose,
             dtype});  // no rows past the groups; widths that are no multiple of a tile
      check({kUneven, 1217, 8, 8, transpose, dtype});
      check({{300, 300, 300, 300}, 1200, 768, 768, transpose, dtype});
      check({{1}, 1, 1024, 2048, transpose, dtype});
      if (HasFatalFailure()) return;
    }
  }
}

// A reset discards the attributes of kernels, such as the limit of their shared memory.
TEST_F(ExpertsCuda, GroupedMatmulWorksAfterAReset) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT32}) {
    check({{70, 0, 200}, 300, 64, 320, false, dtype});
    EXPECT_CUDA(cudaDeviceReset());
    check({{70, 0, 200}, 300, 64, 320, false, dtype});
  }
}

TEST_F(ExpertsCuda, GroupedMatmulAcceptsEverySizeAndFloat32) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32}) {
    for (const bool transpose : {false, true}) {
      check({kUneven, 1300, 33, 45, transpose, dtype});
      check({kUneven, 1300, 64, 45, transpose, dtype});
      check({kUneven, 1300, 45, 64, transpose, dtype});
      check({{70, 0, 200}, 300, 256, 320, transpose, dtype});
      check({{1}, 1, 1, 1, transpose, dtype});
      check({{0, 0}, 4, 3, 2, transpose, dtype});
      check({{2}, 0, 3, 2, transpose, dtype});
      check({{2, 3}, 6, 0, 16, transpose, dtype});
      check({{2, 3}, 6, 16, 0, transpose, dtype});
      check({{}, 6, 16, 16, transpose, dtype});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ExpertsCuda, GroupSizesAreClippedToTheRows) {
  for (const int64_t D : {64, 33}) {
    for (const bool transpose : {false, true}) {
      check({{-5, 3, INT32_MIN, 4, -1}, 6, D, 72, transpose});
      check({{2, INT32_MAX, INT32_MAX, 1}, 700, D, 72, transpose});
      check({{INT32_MAX, -1, INT32_MAX}, 300, D, 72, transpose});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ExpertsCuda, ManyGroups) {
  std::mt19937 random(4);
  std::vector<int32_t> sizes(700);
  int64_t R = 50;
  for (int32_t& size : sizes) {
    size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 40);
    R += size;
  }
  sizes[333] = 3000;
  R += 3000;
  check({sizes, R, 64, 72});
  check({sizes, R, 64, 72, true});
}

// The Hopper kernels require 16-byte aligned addresses.
TEST_F(ExpertsCuda, UnalignedOperands) {
  const Case c{{20, 0, 44}, 70, 64, 72};
  const GroupedMatmul op(c);
  const FloatTensor want({c.R, c.N}, c.dtype);
  op.on_cpu(want);
  const FloatTensor shifted({c.R * c.D + 1}, c.dtype);
  std::memcpy(static_cast<uint16_t*>(shifted.view()->data) + 1, op.x.view()->data, static_cast<size_t>(c.R * c.D) * 2);
  const FloatTensor got({c.R, c.N}, c.dtype);
  ab_grouped_matmul_args args = op.args(got);
  Mirrors mirrors;
  ab_tensor x = *args.x;
  x.data = static_cast<uint16_t*>(mirrors.add(shifted.view())->data) + 1;
  args.x = &x;
  for (const ab_tensor** tensor : {&args.w, &args.group_sizes, &args.y}) *tensor = mirrors.add(*tensor);
  EXPECT_OK(ab_cuda_grouped_matmul(&args, nullptr));
  mirrors.fetch();
  compare(c, got, want);
}

TEST_F(ExpertsCuda, ReplaysInAGraph) {
  const Case c{kUneven, 1300, 256, 512};
  const GroupedMatmul op(c);
  const FloatTensor direct({c.R, c.N}, c.dtype);
  op.on_gpu(direct);
  const FloatTensor replayed({c.R, c.N}, c.dtype);
  ab_grouped_matmul_args args = op.args(replayed);
  Mirrors mirrors;
  for (const ab_tensor** tensor : {&args.x, &args.w, &args.group_sizes, &args.y}) *tensor = mirrors.add(*tensor);
  replay_in_graph([&](cudaStream_t stream) {
    const ab_exec exec{sizeof(ab_exec), 0, stream, nullptr, 0};
    EXPECT_OK(ab_cuda_grouped_matmul(&args, &exec));
    EXPECT_OK(ab_cuda_grouped_matmul(&args, &exec));
  });
  mirrors.fetch();
  EXPECT_TRUE(replayed.is(direct));
}

// With R * D > 2^31, the last rows have the same results as in a small call.
TEST_F(ExpertsCuda, MoreThanTwoToThe31Elements) {
  constexpr int64_t kTail = 300;
  constexpr int64_t D = 2048;
  constexpr int64_t N = 64;
  constexpr int64_t R = (int64_t{1} << 31) / D + 5000;
  SKIP_WITHOUT_GIB(8);
  const Case small{{100, 200}, kTail, D, N};
  const GroupedMatmul op(small);
  const FloatTensor want({kTail, N}, small.dtype);
  op.on_gpu(want);

  char* x = nullptr;
  char* y = nullptr;
  EXPECT_CUDA(cudaMalloc(&x, R * D * 2));
  EXPECT_CUDA(cudaMalloc(&y, R * N * 2));
  EXPECT_CUDA(cudaMemset(x, 0, R * D * 2));
  EXPECT_CUDA(cudaMemcpy(x + (R - kTail) * D * 2, op.x.view()->data, kTail * D * 2, cudaMemcpyHostToDevice));
  const Tensor<int32_t> sizes({3}, {static_cast<int32_t>(R - 200), 0, 200});
  const FloatTensor w({3, D, N}, small.dtype);  // the middle expert's weights are NaN
  const size_t one = D * N * 2;
  std::memcpy(w.view()->data, op.w.view()->data, one);
  std::memcpy(static_cast<char*>(w.view()->data) + 2 * one, static_cast<char*>(op.w.view()->data) + one, one);
  Mirrors mirrors;
  const ab_tensor x_view{x, AB_BFLOAT16, 2, {R, D}, nullptr};
  const ab_tensor y_view{y, AB_BFLOAT16, 2, {R, N}, nullptr};
  const ab_grouped_matmul_args args =
      grouped_matmul_args(&x_view, mirrors.add(w.view()), mirrors.add(sizes.view()), &y_view);
  EXPECT_OK(ab_cuda_grouped_matmul(&args, nullptr));
  mirrors.fetch();
  const FloatTensor got({kTail, N}, small.dtype);
  EXPECT_CUDA(cudaMemcpy(got.view()->data, y + (R - kTail) * N * 2, kTail * N * 2, cudaMemcpyDeviceToHost));
  compare(small, got, want);
  cudaFree(x);
  cudaFree(y);
}

TEST_F(ExpertsCuda, BadArgumentsAreRefused) {
  const Case c{{2, 2}, 4, 3, 5};
  const GroupedMatmul op(c);
  const FloatTensor y({4, 5}, c.dtype);
  ab_grouped_matmul_args args = op.args(y);
  args.transpose_w = 1;
  EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT,
                 "w: got bfloat16 (7) [2, 3, 5], expected bfloat16 [E=2, N, D=3]");
  size_t bytes = 0;
  EXPECT_REFUSED(ab_cuda_grouped_matmul_workspace(&args, nullptr, &bytes), AB_INVALID_ARGUMENT, "w: got bfloat16");
  args = op.args(y);
  args.precision = 3;
  EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "precision: got 3, expected 0 to 2");
  EXPECT_REFUSED(ab_cuda_grouped_matmul(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_args: got NULL");
}

// Without a GPU, the call returns an error that names the reason.
TEST(ExpertsWithoutCuda, TheErrorNamesTheReason) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "a GPU is present";
  const GroupedMatmul op({{2, 2}, 4, 8, 8});
  const FloatTensor y({4, 8}, AB_BFLOAT16);
  const ab_grouped_matmul_args args = op.args(y);
  EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, nullptr), AB_UNSUPPORTED, "grouped_matmul: no usable GPU");
}

}  // namespace
}  // namespace anabranch::testing
