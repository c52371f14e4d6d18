#include "experts/products.h"

#include "experts/clear_padding.h"
#include "experts/hopper/weight_gradient.h"

namespace anabranch::cuda {

SimpleProduct simple_product(const RowsProduct& p) {
  SimpleProduct product;
  product.a = {const_cast<void*>(p.x), p.dtype, 0, p.K, 1};
  const int64_t columns = p.stored_columns();
  product.b = {const_cast<void*>(p.w), p.dtype, p.K * columns, p.transposed ? 1 : columns, p.transposed ? p.K : 1};
  product.group_sizes = p.group_sizes;
  product.R = p.R;
  product.E = p.E;
  product.rows = p.R;
  product.columns = p.N;
  product.terms = p.K;
  return product;
}

namespace {

RowSource rows_of(const Floats& matrix, bool gathered, const RowMap& map) {
  if (gathered && map.slots != nullptr) return map.rows_of(matrix.data);
  return {matrix.data};
}

WeightGradient weight_gradient(const TermsProduct& p) {
  WeightGradient gradient;
  gradient.x = rows_of(p.x, p.gathers_x, p.map);
  gradient.d_y = rows_of(p.d_y, p.gathers_d_y, p.map);
  gradient.group_sizes = p.group_sizes;
  gradient.d_w = p.d_w.data;
  gradient.dtype = p.x.dtype;
  gradient.d_w_dtype = p.d_w.dtype;
  gradient.accumulates = p.accumulates;
  gradient.R = p.R;
  gradient.E = p.E;
  gradient.D = p.D;
  gradient.N = p.N;
  return gradient;
}

// As far as shapes and dtypes tell.
bool suits_tensor_cores(const TermsProduct& p) {
  return p.x.dtype == p.d_y.dtype && runs_on_tensor_cores(weight_gradient(p), false);
}

SimpleProduct simple_product(const TermsProduct& p) {
  SimpleProduct product;
  product.a = {p.x.data, p.x.dtype, 0, p.D, 1, p.gathers_x && p.map.slots != nullptr};
  product.b = {p.d_y.data, p.d_y.dtype, 0, p.N, 1, p.gathers_d_y && p.map.slots != nullptr};
  product.map = p.map;
  product.group_sizes = p.group_sizes;
  product.R = p.R;
  product.E = p.E;
  product.rows = p.D;
  product.columns = p.N;
  product.terms = p.R;
  return product;
}

}  // namespace

ab_status compute_rows(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  if (p.R * p.N == 0) return ok();
  if (runs_on_tensor_cores(p)) return multiply_rows(p, multiprocessors, stream);
  return multiply_rows_simply(simple_product(p), {p.y, p.dtype, 0, p.N, 1}, multiprocessors, stream);
}

ab_status compute_rows(const RowsProduct& p, const RowMap& map, int multiprocessors, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(compute_rows(p, multiprocessors, stream));
  return clear_padding(map, {p.y, p.dtype}, p.R, p.N, multiprocessors, stream);
}

size_t workspace_of(const TermsProduct& p) { return suits_tensor_cores(p) ? workspace_of(weight_gradient(p)) : 0; }

ab_status compute_terms(const TermsProduct& p, void* workspace, int multiprocessors, cudaStream_t stream) {
  if (p.E * p.D * p.N == 0) return ok();
  if (suits_tensor_cores(p) && runs_on_tensor_cores(weight_gradient(p))) {
    return multiply_terms(weight_gradient(p), workspace, multiprocessors, stream);
  }
  return multiply_terms_simply(simple_product(p), {p.d_w.data, p.d_w.dtype, p.D * p.N, p.N, 1}, p.accumulates,
                               multiprocessors, stream);
}

}  // namespace anabranch::cuda
