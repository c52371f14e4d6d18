// A projection with an adapter, and its gradients, in float64 and from the sum W + scale A B.
#pragma once

#include "fp8_operands.h"
#include "ordered_tensor.h"

namespace anabranch::testing {

struct LoraReference {
  int64_t E, C, N, r;
  Doubles w, a, b;  // row-major [E, C, N], [E or 1, C, r], [E or 1, r, N]
  double scale;
  Doubles d_w, d_a, d_b;

  LoraReference(const OrderedTensor& weights, const OrderedTensor& factor_a, const OrderedTensor& factor_b, double s)
      : E(weights.view()->shape[0]),
        C(weights.view()->shape[1]),
        N(weights.view()->shape[2] * (weights.view()->rank == 4 ? weights.view()->shape[3] : 1)),
        r(factor_a.view()->shape[2]),
        w(weights.values()),
        a(factor_a.values()),
        b(factor_b.values()),
        scale(s),
        d_w(w.size()),
        d_a(a.size()),
        d_b(b.size()) {}

  // Matrix e of `size` elements; the only one if the experts share it.
  static std::span<const double> of(const Doubles& values, int64_t e, int64_t size) {
    const auto count = static_cast<size_t>(size);
    return std::span(values).subspan(values.size() == count ? 0 : static_cast<size_t>(e) * count, count);
  }
  static void add(Doubles& values, int64_t e, double factor, const Doubles& terms) {
    double* to = values.data() + (values.size() == terms.size() ? 0 : static_cast<size_t>(e) * terms.size());
    for (size_t i = 0; i < terms.size(); ++i) to[i] += factor * terms[i];
  }

  Doubles sum(int64_t e) const {
    const std::span<const double> matrix = of(w, e, C * N);
    Doubles result(matrix.begin(), matrix.end());
    add(result, 0, scale, matmul(of(a, e, C * r), of(b, e, r * N), C, r, N));
    return result;
  }

  // For m rows x [m, C] and d_y [m, N] of expert e.
  Doubles y(int64_t e, const Doubles& x, int64_t m) const { return matmul(x, sum(e), m, C, N); }
  Doubles d_x(int64_t e, const Doubles& d_y, int64_t m) const { return matmul(d_y, transposed(sum(e), C, N), m, N, C); }
  Doubles u(int64_t e, const Doubles& x, int64_t m) const { return scaled(matmul(x, of(a, e, C * r), m, C, r)); }
  Doubles v(int64_t e, const Doubles& d_y, int64_t m) const {
    return scaled(matmul(d_y, transposed(of(b, e, r * N), r, N), m, N, r));
  }
  void add_gradients(int64_t e, const Doubles& x, const Doubles& d_y, int64_t m) {
    const Doubles gradient = matmul(transposed(x, m, C), d_y, C, m, N);
    add(d_w, e, 1, gradient);
    add(d_a, e, scale, matmul(gradient, transposed(of(b, e, r * N), r, N), C, N, r));
    add(d_b, e, scale, matmul(transposed(of(a, e, C * r), C, r), gradient, r, C, N));
  }

 private:
  Doubles scaled(Doubles values) const {
    for (double& value : values) value *= scale;
    return values;
  }
};

}  // namespace anabranch::testing
