#include "balance/score_sum.h"

#include "core/dtype.h"

namespace anabranch::AB_ISA {
namespace {

void add_rows(const void* scores, int32_t dtype, int64_t rows, int64_t columns, float* sum) {
  with_float_type(dtype, [&]<class T>(T) {
    const T* row = static_cast<const T*>(scores);
    for (int64_t e = 0; e < columns; ++e) sum[e] = 0.0f;
    for (int64_t r = 0; r < rows; ++r, row += columns) {
      for (int64_t e = 0; e < columns; ++e) sum[e] += to_float(row[e]);
    }
  });
}

}  // namespace

const ScoreSumKernels kScoreSum = {add_rows};

}  // namespace anabranch::AB_ISA
