// The load-balancing loss on the GPU against the CPU, from dense scores and from statistics.
#include <cmath>
#include <random>
#include <vector>

#include "anabranch/cuda.h"
#include "device.h"
#include "float_tensor.h"

namespace anabranch::testing {
namespace {

class BalanceCuda : public CudaTest {};

TEST_F(BalanceCuda, LossOfDenseScoresAndItsGradient) {
  unsigned seed = 0;
  for (const int64_t T : {0, 1, 300, 5000}) {
    for (const int64_t C : {1, 8, 130, 1000}) {
      for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
        FloatTensor probs({T, C}, dtype);
        probs.fill_uniform(++seed);
        FloatTensor float_counts({C}, dtype);
        Tensor<int64_t> counts({C});
        for (int64_t c = 0; c < C; ++c) counts[c] = c * 7 % 100;
        for (int64_t c = 0; c < C; ++c) float_counts.set(c, static_cast<float>(counts[c]));
        const Tensor<int64_t> tokens(std::vector<int64_t>{}, std::vector<int64_t>{T == 1 ? 0 : 1000});
        const Tensor<float> d_loss(std::vector<int64_t>{}, std::vector<float>{2.5f});
        ab_moe_aux_loss_args args{};
        args.size = sizeof(args);
        args.topk = 1;
        args.num_experts = C % 2 == 0 ? static_cast<int32_t>(C / 2) : 0;
        args.coeff = 0.5f;
        args.probs = probs.view();
        args.tokens_per_expert = seed % 2 == 0 ? counts.view() : float_counts.view();
        args.num_tokens = seed % 3 == 0 ? nullptr : tokens.view();
        args.d_loss = seed % 5 == 0 ? nullptr : d_loss.view();
        const Tensor<float> want(std::vector<int64_t>{}), got(std::vector<int64_t>{});
        const FloatTensor d_want({T, C}, dtype), d_got({T, C}, dtype);
        args.loss = want.view();
        args.d_probs = d_want.view();
        EXPECT_OK(call(ab_moe_aux_loss, ab_moe_aux_loss_workspace, args));
        using Args = ab_moe_aux_loss_args;
        args.loss = got.view();
        args.d_probs = d_got.view();
        run_on_copies(ab_cuda_moe_aux_loss_workspace, ab_cuda_moe_aux_loss, args, &Args::probs,
                      &Args::tokens_per_expert, &Args::num_tokens, &Args::d_loss, &Args::loss, &Args::d_probs);
        double terms = 0.0;
        const double N = args.num_tokens == nullptr ? static_cast<double>(T) : static_cast<double>(tokens[0]);
        const double E = args.num_experts == 0 ? static_cast<double>(C) : args.num_experts;
        for (int64_t i = 0; N > 0 && i < T * C; ++i) {
          terms += 0.5 * E / (N * N) * static_cast<double>(counts[i % C]) * std::abs(static_cast<double>(probs.get(i)));
        }
        EXPECT_NEAR(got[0], want[0], 1e-6 * terms) << "T " << T << " C " << C;
        EXPECT_TRUE(d_got.is(d_want)) << "T " << T << " C " << C << " dtype " << dtype;
      }
    }
  }
}

TEST_F(BalanceCuda, LossAndScoreSumMatchTheCpu) {
  for (const int64_t B : {1, 5}) {
    constexpr int64_t E = 70;
    constexpr int64_t T = 500;
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform;
    Tensor<float> scores({T, E});
    for (float& value : scores.values()) value = uniform(random);
    const std::vector<int64_t> shape = B == 1 ? std::vector<int64_t>{E} : std::vector<int64_t>{B, E};
    Tensor<int32_t> counts(shape);
    for (int32_t& count : counts.values()) count = static_cast<int32_t>(random() % 50);
    Tensor<int32_t> tokens(B == 1 ? std::vector<int64_t>{} : std::vector<int64_t>{B});
    for (int64_t b = 0; b < B; ++b) tokens[b] = b == 2 ? 0 : 100;
    struct Side {
      explicit Side(const std::vector<int64_t>& s) : sum(s), loss({}), gradient(s) {}
      Tensor<float> sum;
      Tensor<float> loss;
      Tensor<float> gradient;
    };
    const Side want(shape);
    const Side got(shape);
    for (const bool device : {false, true}) {
      const Side& side = device ? got : want;
      ab_score_sum_args sums{sizeof(sums), scores.view(), side.sum.view()};
      Mirrors mirrors;
      if (device) {
        sums.scores = mirrors.add(sums.scores);
        sums.score_sum = mirrors.add(sums.score_sum);
        size_t bytes = 0;
        EXPECT_OK(ab_cuda_score_sum_workspace(&sums, nullptr, &bytes));
        DeviceWorkspace workspace(bytes);
        EXPECT_OK(ab_cuda_score_sum(&sums, &workspace.exec()));
        mirrors.fetch();
      } else {
        EXPECT_OK(call(ab_score_sum, ab_score_sum_workspace, sums));
      }
      ab_load_balance_loss_args loss{};
      loss.size = sizeof(loss);
      loss.topk = 4;
      loss.coeff = 0.1f;
      loss.score_sum = side.sum.view();
      loss.tokens_per_expert = counts.view();
      loss.num_tokens = tokens.view();
      loss.loss = side.loss.view();
      loss.d_score_sum = side.gradient.view();
      Mirrors more;
      if (!device) {
        EXPECT_OK(ab_load_balance_loss(&loss, nullptr));
        continue;
      }
      for (const ab_tensor** tensor :
           {&loss.score_sum, &loss.tokens_per_expert, &loss.num_tokens, &loss.loss, &loss.d_score_sum}) {
        *tensor = more.add(*tensor);
      }
      EXPECT_OK(ab_cuda_load_balance_loss(&loss, nullptr));
      more.fetch();
    }
    for (int64_t i = 0; i < want.sum.size(); ++i) {
      EXPECT_NEAR(got.sum[i], want.sum[i], 1e-4f);
      EXPECT_EQ(got.gradient[i], want.gradient[i]);
    }
    EXPECT_NEAR(got.loss[0], want.loss[0], 1e-6f * want.loss[0]);
  }
}

}  // namespace
}  // namespace anabranch::testing
