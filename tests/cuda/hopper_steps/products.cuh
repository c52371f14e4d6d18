// Helpers for steps that run whole GEMMs: device operands, launches, and float64 reference sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "experts/hopper/rows_product.cuh"
#include "steps.h"

namespace anabranch::steps {

using namespace anabranch::cuda;
using namespace anabranch::cuda::hopper;

struct Case {
  std::vector<int32_t> sizes;
  int64_t R;
  int64_t D;
  int64_t N;
};

// The operands and the result of a case on the device.
template <class Element>
struct Operands {
  Operands(const Case& c, unsigned seed)
      : shape(c),
        E(static_cast<int64_t>(c.sizes.size())),
        x(random_bits<Element>(c.R * c.D, seed)),
        w(random_bits<Element>(E * c.D * c.N, seed + 1)),
        sizes(c.sizes),
        rows(row_indices(c.R, seed + 2)),
        y(c.R * c.N) {}

  // Row r reads row (5 r + 3) mod R of x. Some rows get an index out of range.
  static std::vector<int32_t> row_indices(int64_t R, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> indices(static_cast<size_t>(R));
    for (int64_t r = 0; r < R; ++r) {
      indices[static_cast<size_t>(r)] = static_cast<int32_t>((5 * r + 3) % R);
      if (random() % 50 == 0) indices[static_cast<size_t>(r)] = random() % 2 == 0 ? -1 : static_cast<int32_t>(R);
    }
    return indices;
  }

  RowsProduct gemm(bool transposed) const {
    RowsProduct p;
    p.x = x.data();
    p.w = w.data();
    p.transposed = transposed;
    p.group_sizes = sizes.data();
    p.y = y.data();
    p.dtype = std::is_same_v<Element, BFloat16> ? AB_BFLOAT16 : AB_FLOAT16;
    p.R = shape.R;
    p.E = E;
    p.D = shape.D;
    p.N = shape.N;
    return p;
  }

  Case shape;
  int64_t E;
  DeviceArray<uint16_t> x;
  DeviceArray<uint16_t> w;
  DeviceArray<int32_t> sizes;
  DeviceArray<int32_t> rows;
  DeviceArray<uint16_t> y;
};

// Computes y, by default into the operands' own. overlaps: the kernel may start before the previous one ends.
template <class Shape, class Element, Major kMajorB, bool kGathers>
ab_status multiply(const Operands<Element>& operands, uint16_t* y = nullptr, bool overlaps = true) {
  RowsProduct p = operands.gemm(kMajorB == Major::k);
  if (y != nullptr) p.y = y;
  using A = std::conditional_t<kGathers, GatheredRowOperand, RowOperand>;
  RowsProductOf<Shape, Element, A, kMajorB, RowsEpilogue<Element>> product;
  if constexpr (kGathers) {
    product.a = {{static_cast<const char*>(p.x), operands.rows.data(), Divisor(1), static_cast<int32_t>(p.R),
                  static_cast<int32_t>(p.D / 8)}};
  } else {
    AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", {const_cast<void*>(p.x), p.dtype}, p.map, p.D, &product.a));
  }
  AB_RETURN_IF_ERROR((prepare_rows_product<Shape, Element, A, kMajorB, RowsEpilogue<Element>>(p, &product)));
  return launch_product("grouped GEMM", product, max_tiles(p, product), multiprocessors(), nullptr, overlaps);
}

// Computes want[r, n] in float64, and the sum of the magnitudes of its terms. One thread per element.
template <class Element>
__global__ void reference(RowsProduct p, const int32_t* rows, double* want, double* scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.R * p.N) return;
  const int64_t r = i / p.N;
  const int64_t n = i % p.N;
  int64_t e = 0;
  int64_t end = 0;
  for (; e < p.E; ++e) {
    end += max(p.group_sizes[e], 0);
    if (r < end) break;
  }
  const int64_t from = rows == nullptr ? r : rows[r];
  double sum = 0;
  double size = 0;
  if (e < p.E && from >= 0 && from < p.R) {
    const auto* x = static_cast<const Element*>(p.x) + from * p.D;
    const auto* w = static_cast<const Element*>(p.w) + e * p.D * p.N;
    for (int64_t k = 0; k < p.D; ++k) {
      const double term =
          static_cast<double>(to_float(x[k])) * to_float(p.transposed ? w[n * p.D + k] : w[k * p.N + n]);
      sum += term;
      size += fabs(term);
    }
  }
  want[i] = sum;
  scale[i] = size;
}

}  // namespace anabranch::steps
