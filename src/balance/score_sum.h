// Column sums of one block of rows, one kernel per instruction set.
#pragma once

#include <cstdint>

#include "core/isa.h"

namespace anabranch {

struct ScoreSumKernels {
  // sum[e] = sum over rows r of scores[r, e]; scores is [rows, columns] of a float dtype, sum float32[columns].
  void (*add_rows)(const void* scores, int32_t dtype, int64_t rows, int64_t columns, float* sum);
};

AB_DECLARE_ISA(ScoreSumKernels, kScoreSum)

}  // namespace anabranch
