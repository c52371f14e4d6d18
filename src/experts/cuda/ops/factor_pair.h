// The two GEMMs of an adapter's backward pass that read the same rows.
#pragma once

#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/weight_gradient.h"
#include "experts/cuda/ops/workspace_sizes.h"

namespace anabranch::cuda {

// A thin RowsProduct y = factor m op(f[e]) of rows m and a factor f, and the gradient of f, which is m^T d_y or x^T m.
// A kernel for both reads m once. It sums y in parts of kPairColumns columns of m, which are added in ascending order.
struct FactorPair {
  RowsProduct rows;
  WeightGradient gradient;
  float* parts = nullptr;  // pair_bytes()
};

}  // namespace anabranch::cuda
