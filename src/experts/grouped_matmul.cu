// ab_cuda_grouped_matmul, ab_cuda_grouped_matmul_dw: on the tensor cores what they can take, the rest the simple way.
#include "anabranch/cuda.h"
#include "core/cuda/device.h"
#include "core/cuda/launch.h"
#include "core/tensor.h"
#include "experts/check.h"
#include "experts/hopper/rows_product.h"
#include "experts/hopper/weight_gradient.h"
#include "experts/simple_product.h"

namespace anabranch::cuda {
namespace {

RowsProduct rows_product(const ab_grouped_matmul_args& args, const GroupedSizes& s) {
  RowsProduct product;
  product.x = args.x->data;
  product.w = args.w->data;
  product.transposed = args.transpose_w != 0;
  product.group_sizes = data<const int32_t>(args.group_sizes);
  product.y = args.y->data;
  product.dtype = args.x->dtype;
  product.R = s.R;
  product.E = s.E;
  product.K = s.D;
  product.N = s.N;
  return product;
}

SimpleProduct simple_product(const ab_grouped_matmul_args& args, const GroupedSizes& s) {
  SimpleProduct product;
  product.a = {args.x->data, args.x->dtype, 0, s.D, 1};
  product.b = {args.w->data, args.w->dtype, s.D * s.N, args.transpose_w != 0 ? 1 : s.N,
               args.transpose_w != 0 ? s.D : 1};
  product.out = {args.y->data, args.y->dtype, 0, s.N, 1};
  product.group_sizes = data<const int32_t>(args.group_sizes);
  product.R = s.R;
  product.E = s.E;
  product.rows = s.R;
  product.columns = s.N;
  product.terms = s.D;
  return product;
}

WeightGradient weight_gradient(const ab_grouped_matmul_dw_args& args, const GroupedSizes& s) {
  WeightGradient gradient;
  gradient.x.data = args.x->data;
  gradient.d_y.data = args.d_y->data;
  gradient.group_sizes = data<const int32_t>(args.group_sizes);
  gradient.d_w = args.d_w->data;
  gradient.dtype = args.x->dtype;
  gradient.d_w_dtype = args.d_w->dtype;
  gradient.R = s.R;
  gradient.E = s.E;
  gradient.D = s.D;
  gradient.N = s.N;
  return gradient;
}

// As far as shapes and dtypes tell.
bool suits_tensor_cores(const ab_grouped_matmul_dw_args& args, const GroupedSizes& s) {
  return args.x->dtype == args.d_y->dtype && runs_on_tensor_cores(weight_gradient(args, s), false);
}

SimpleProduct simple_product(const ab_grouped_matmul_dw_args& args, const GroupedSizes& s) {
  SimpleProduct product;
  product.a = {args.x->data, args.x->dtype, 0, 1, s.D};
  product.b = {args.d_y->data, args.d_y->dtype, 0, s.N, 1};
  product.out = {args.d_w->data, args.d_w->dtype, s.D * s.N, s.N, 1};
  product.group_sizes = data<const int32_t>(args.group_sizes);
  product.R = s.R;
  product.E = s.E;
  product.rows = s.D;
  product.columns = s.N;
  product.terms = s.R;
  return product;
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec*, size_t* bytes) {
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  *bytes = 0;
  return ok();
}

ab_status ab_cuda_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec) {
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  int multiprocessors = 0;
  AB_RETURN_IF_ERROR(cuda::find_hopper("grouped_matmul", &multiprocessors));
  if (s.R * s.N == 0) return ok();
  const cudaStream_t stream = cuda::stream_of(exec);
  const cuda::RowsProduct product = cuda::rows_product(*args, s);
  if (cuda::runs_on_tensor_cores(product)) return cuda::multiply_rows(product, multiprocessors, stream);
  return cuda::multiply_rows_simply(cuda::simple_product(*args, s), multiprocessors, stream);
}

ab_status ab_cuda_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec*, size_t* bytes) {
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  *bytes = cuda::suits_tensor_cores(*args, s) ? cuda::workspace_of(cuda::weight_gradient(*args, s)) : 0;
  return ok();
}

ab_status ab_cuda_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec) {
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(ab_cuda_grouped_matmul_dw_workspace(args, exec, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  int multiprocessors = 0;
  AB_RETURN_IF_ERROR(cuda::find_hopper("grouped_matmul_dw", &multiprocessors));
  if (s.E * s.D * s.N == 0) return ok();
  const cudaStream_t stream = cuda::stream_of(exec);
  const cuda::WeightGradient gradient = cuda::weight_gradient(*args, s);
  if (cuda::suits_tensor_cores(*args, s) && cuda::runs_on_tensor_cores(gradient)) {
    return cuda::multiply_terms(gradient, exec->workspace, multiprocessors, stream);
  }
  return cuda::multiply_terms_simply(cuda::simple_product(*args, s), multiprocessors, stream);
}

}  // extern "C"
