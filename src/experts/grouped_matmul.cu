// ab_cuda_grouped_matmul: on the tensor cores what they can take, the rest the simple way.
#include "anabranch/cuda.h"
#include "core/cuda/device.h"
#include "core/cuda/launch.h"
#include "core/tensor.h"
#include "experts/check.h"
#include "experts/hopper/rows_product.h"
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
  product.x = {args.x->data, args.x->dtype, 0, s.D, 1};
  product.w = {args.w->data, args.w->dtype, s.D * s.N, args.transpose_w != 0 ? 1 : s.N,
               args.transpose_w != 0 ? s.D : 1};
  product.y = {args.y->data, args.y->dtype, 0, s.N, 1};
  product.group_sizes = data<const int32_t>(args.group_sizes);
  product.R = s.R;
  product.E = s.E;
  product.K = s.D;
  product.N = s.N;
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
  return cuda::multiply_simply(cuda::simple_product(*args, s), multiprocessors, stream);
}

}  // extern "C"
