#include "torch/gate.h"

#include <cstdint>
#include <utility>

#include "torch/blas.h"
#include "torch/operations.h"
#include "torch/prepared.h"

namespace anabranch::torch {

namespace {

// int32 [1] that holds the number of rows.
Tensor one_group(const Tensor& rows) {
  const int64_t one = 1;
  Tensor sizes = empty(1, &one, shims.dtype_int32(), rows.device_type(), rows.device_index());
  *static_cast<int32_t*>(sizes.data()) = static_cast<int32_t>(rows.sizes()[0]);
  return sizes;
}

// rows [T, M] times matrix [M, N], float32.
Tensor rows_on_cpu(const Tensor& given_rows, const Tensor& given_matrix) {
  const int32_t float32 = shims.dtype_float32();
  const Tensor rows = contiguous(to_dtype(given_rows, float32)), matrix = to_dtype(given_matrix, float32);
  const bool transpose = !is_contiguous(matrix);
  const Tensor stored = contiguous(transpose ? transposed(matrix) : matrix.share());
  const int64_t shape[] = {1, stored.sizes()[0], stored.sizes()[1]};
  const Tensor w = viewed(stored, 3, shape), sizes = one_group(rows);
  Arguments arguments;
  for (const Tensor* operand : {&rows, &w, &sizes}) arguments.add(*operand);
  arguments.add_option(static_cast<int8_t>(transpose));
  arguments.add_option(Value{0});  // precision "highest"
  arguments.add_option(Value{0});  // fp8_scales
  static const int32_t number = operation_number("grouped_matmul");
  return std::move(run(number, arguments)[0]);
}

// x^T d_logits [D, E], float32.
Tensor gradient_on_cpu(const Tensor& given_x, const Tensor& d_logits) {
  const int32_t float32 = shims.dtype_float32();
  const Tensor x = contiguous(to_dtype(given_x, float32)), sizes = one_group(x);
  Arguments arguments;
  for (const Tensor* operand : {&x, &d_logits, &sizes}) arguments.add(*operand);
  arguments.add_option(static_cast<int8_t>(float32));
  arguments.add_option(Value{0});   // precision "highest"
  arguments.add_option(int8_t{0});  // one matrix per expert
  static const int32_t number = operation_number("grouped_matmul_dw");
  const Tensor product = std::move(run(number, arguments)[0]);
  // product is [1, D, E].
  return viewed(product, 2, product.sizes() + 1);
}

}  // namespace

Tensor gate_logits(const Tensor& x, const Tensor& gate) {
  if (!x.on_cuda()) return rows_on_cpu(x, gate);
  return multiply(x, gate, shims.dtype_float32());
}

std::pair<Tensor, Tensor> gate_backward(const Tensor& x, const Tensor& gate, const Tensor& d_logits, bool needs_x,
                                        bool needs_gate) {
  std::pair<Tensor, Tensor> gradients;
  if (!x.on_cuda()) {
    if (needs_x) gradients.first = to_dtype(rows_on_cpu(d_logits, transposed(gate)), x.dtype());
    if (needs_gate) gradients.second = gradient_on_cpu(x, d_logits);
    return gradients;
  }
  if (needs_x) gradients.first = multiply(d_logits, transposed(gate), x.dtype());
  if (needs_gate) gradients.second = multiply(transposed(x), d_logits, shims.dtype_float32());
  return gradients;
}

}  // namespace anabranch::torch
