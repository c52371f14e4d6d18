// Failures of memory allocation and of oneDNN become statuses. No exception leaves a C function.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "anabranch/experts.h"
#include "anabranch/router.h"
#include "grouped_matmul_args.h"
#include "support.h"

// Replaces the standard library's operators. Counts allocations and can fail them. noinline avoids the compiler warning
// about passing memory from new to free.
static std::atomic<bool> out_of_memory{false};
static std::atomic<int> allocations{0};

[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  void* memory = out_of_memory ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// The interposed dnnl_sgemm returns this status if it is not 0.
static std::atomic<int> onednn_failure{0};

extern "C" __attribute__((visibility("default"))) int dnnl_sgemm(char transpose_a, char transpose_b, int64_t m,
                                                                 int64_t n, int64_t k, float alpha, const float* a,
                                                                 int64_t lda, const float* b, int64_t ldb, float beta,
                                                                 float* c, int64_t ldc) {
  using Sgemm = decltype(&dnnl_sgemm);
  static const auto sgemm = reinterpret_cast<Sgemm>(dlsym(RTLD_NEXT, "dnnl_sgemm"));
  if (onednn_failure != 0) return onednn_failure;
  return sgemm(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

namespace anabranch::testing {
namespace {

struct Routing {
  Tensor<float> logits{{2, 4}, {1, 2, 3, 4, 4, 3, 2, 1}};
  Tensor<float> weights{{2, 2}};
  Tensor<int32_t> experts{{2, 2}};
  alignas(64) char workspace[1 << 16];

  ab_status run(int32_t topk) {
    ab_router_forward_args args{};
    args.size = sizeof(args);
    args.topk = topk;
    args.scaling_factor = 1.0f;
    args.normalize = 1;
    args.logits = logits.view();
    args.weights = weights.view();
    args.experts = experts.view();
    const ab_exec exec{sizeof(exec), 1, nullptr, workspace, sizeof(workspace)};
    return ab_router_forward(&args, &exec);
  }
};

TEST(Failures, OfMemoryDoNotAffectArgumentChecks) {
  Routing routing;
  const int before = allocations;
  out_of_memory = true;
  const ab_status right = routing.run(2);
  const ab_status wrong = routing.run(3);
  out_of_memory = false;
  EXPECT_EQ(allocations, before) << "a call allocated memory";
  EXPECT_OK(right);
  EXPECT_REFUSED(wrong, AB_INVALID_ARGUMENT, "weights: got float32 (8) [2, 2], expected float32 [T=2, K=3]");
}

TEST(Failures, OfOneDnnKeepTheirKind) {
  char description[1024];
  ab_describe(description, sizeof(description));
  if (std::strstr(description, "onednn=none") != nullptr) GTEST_SKIP() << "a build without oneDNN";
  const Tensor<float> x({2, 2}, {1, 2, 3, 4});
  const Tensor<float> w({1, 2, 2}, {1, 2, 3, 4});
  const Tensor<int32_t> groups({1}, std::vector<int32_t>{2});
  const Tensor<float> y({2, 2});
  const ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), groups.view(), y.view());
  const auto run = [&](int failure) {
    onednn_failure = failure;
    const ab_status status = call(ab_grouped_matmul, ab_grouped_matmul_workspace, args, 1);
    onednn_failure = 0;
    return status;
  };
  constexpr int kOutOfMemory = 1, kInvalid = 2, kUnimplemented = 3;  // from dnnl_types.h
  EXPECT_REFUSED(run(kOutOfMemory), AB_OUT_OF_MEMORY, "oneDNN: a GEMM failed, expected memory");
  EXPECT_REFUSED(run(kInvalid), AB_INTERNAL, "oneDNN: a GEMM failed: invalid_arguments");
  EXPECT_REFUSED(run(kUnimplemented), AB_UNSUPPORTED, "oneDNN: a GEMM failed: unimplemented");
  EXPECT_OK(run(0));
  EXPECT_EQ(y.values(), (std::vector<float>{7, 10, 15, 22}));
}

}  // namespace
}  // namespace anabranch::testing
