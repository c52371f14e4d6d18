// The loss of dense scores on the GPU against the CPU's.
#include <cmath>

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

}  // namespace
}  // namespace anabranch::testing
