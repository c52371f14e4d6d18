#include "core/xla.h"
#include "anabranch/balance.h"

namespace {

using anabranch::xla::Field;

constexpr Field kScoreSumFields[] = {
    AB_TENSOR(ab_score_sum_args, scores),
    AB_TENSOR(ab_score_sum_args, score_sum),
};

}  // namespace

AB_XLA_HANDLER(score_sum, kScoreSumFields, ab_score_sum_workspace);
