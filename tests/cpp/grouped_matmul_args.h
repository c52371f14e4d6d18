// Arguments of a grouped GEMM without the optional ones.
#pragma once

#include "anabranch/experts.h"

namespace anabranch::testing {

inline ab_grouped_matmul_args grouped_matmul_args(const ab_tensor* x, const ab_tensor* w, const ab_tensor* group_sizes,
                                                  const ab_tensor* y, int32_t transpose_w = 0,
                                                  int32_t precision = AB_PRECISION_HIGHEST) {
  ab_grouped_matmul_args args{};
  args.size = sizeof(args);
  args.transpose_w = transpose_w;
  args.x = x;
  args.w = w;
  args.group_sizes = group_sizes;
  args.y = y;
  args.precision = precision;
  return args;
}

}  // namespace anabranch::testing
