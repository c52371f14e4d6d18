// The library computes with IEEE arithmetic whatever floating-point mode the calling thread has set, and restores
// that mode on return.
#include <gtest/gtest.h>

#if defined(__SSE2__)

#include <xmmintrin.h>

#include "anabranch/balance.h"
#include "anabranch/experts.h"
#include "support.h"

namespace anabranch::testing {
namespace {

// Sets the thread's floating-point mode to flush denormals to zero and to round towards zero.
class FlushingThread {
 public:
  FlushingThread() : saved_(_mm_getcsr()) { _mm_setcsr(kFlushToZero); }
  ~FlushingThread() {
    EXPECT_EQ(_mm_getcsr() & ~kExceptionFlags, kFlushToZero);
    _mm_setcsr(saved_);
  }
  FlushingThread(const FlushingThread&) = delete;
  FlushingThread& operator=(const FlushingThread&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x1f80 | 0x8000 | 0x0040 | 0x6000;
  static constexpr unsigned kExceptionFlags = 0x3f;
  unsigned saved_;
};

TEST(Arithmetic, KeepsDenormalWeightsOfRows) {
  constexpr uint16_t kOne = 0x3c00;
  const Tensor<uint16_t> x({3, 1}, {kOne, kOne, kOne}, AB_FLOAT16);
  const Tensor<uint16_t> w_in({1, 1, 1, 1}, std::vector<uint16_t>{kOne}, AB_FLOAT16);
  const Tensor<uint16_t> w_out({1, 1, 1}, std::vector<uint16_t>{kOne}, AB_FLOAT16);
  const Tensor<uint16_t> weights({3}, {0x0200, 0x0001, 0x0400}, AB_FLOAT16);  // 2^-15, 2^-24, 2^-14
  const Tensor<int32_t> groups({1}, std::vector<int32_t>{3});
  const Tensor<uint16_t> y({3, 1}, AB_FLOAT16);
  ab_expert_ffn_forward_args args{};
  args.size = sizeof(args);
  args.activation = AB_RELU;
  args.x = x.view();
  args.group_sizes = groups.view();
  args.w_in = w_in.view();
  args.w_out = w_out.view();
  args.weights = weights.view();
  args.y = y.view();
  const FlushingThread flushing;
  EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args));
  EXPECT_EQ(y.values(), weights.values());
}

TEST(Arithmetic, KeepsDenormalLosses) {
  const Tensor<float> score_sum({1}, std::vector<float>{1e-40f});
  const Tensor<int32_t> counts({1}, std::vector<int32_t>{1});
  const Tensor<int32_t> tokens(std::vector<int64_t>{}, std::vector<int32_t>{1});
  const Tensor<float> loss(std::vector<int64_t>{});
  const ab_load_balance_loss_args args{sizeof(args),  1,           1.0f,   score_sum.view(), counts.view(),
                                       tokens.view(), loss.view(), nullptr};
  {
    const FlushingThread flushing;
    EXPECT_OK(ab_load_balance_loss(&args, nullptr));
  }
  EXPECT_EQ(loss[0], 1e-40f);
}

TEST(Arithmetic, KeepsDenormalSums) {
  const Tensor<float> scores({200, 2}, std::vector<float>(400, 1e-40f));
  const Tensor<float> sum({2});
  const ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
  {
    const FlushingThread flushing;
    EXPECT_OK(call(ab_score_sum, ab_score_sum_workspace, args, 2));
  }
  EXPECT_NEAR(sum[0] * 1e10f, 200e-30, 1e-32);
}

TEST(Arithmetic, RestoresTheModeAfterAnError) {
  const FlushingThread flushing;
  EXPECT_REFUSED(ab_load_balance_loss(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_load_balance_loss_args: got NULL");
  const ab_load_balance_loss_args args{sizeof(args), 0, 1.0f, nullptr, nullptr, nullptr, nullptr, nullptr};
  EXPECT_REFUSED(ab_load_balance_loss(&args, nullptr), AB_INVALID_ARGUMENT, "topk: got 0");
}

}  // namespace
}  // namespace anabranch::testing

#endif
