// ab_cuda_grouped_matmul, ab_cuda_grouped_matmul_dw: on the tensor cores what they can take, the rest the simple way.
#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/fp8_product.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"

namespace anabranch::cuda {
namespace {

RowsProduct rows_product(const ab_grouped_matmul_args& args, const GroupedSizes& s) {
  RowsProduct product;
  product.x = args.x->data;
  product.w = data<const void>(args.w);
  product.transposed = args.transpose_w != 0;
  product.group_sizes = data<const int32_t>(args.group_sizes);
  product.y = args.y->data;
  product.dtype = args.y->dtype;
  product.precision = precision_of(args);
  product.R = s.R;
  product.E = s.E;
  product.D = s.D;
  product.N = s.N;
  return product;
}

WeightGradient weight_gradient(const ab_grouped_matmul_dw_args& args, const GroupedSizes& s) {
  WeightGradient gradient;
  gradient.x = Floats(args.x);
  gradient.d_y = Floats(args.d_y);
  gradient.group_sizes = data<const int32_t>(args.group_sizes);
  gradient.d_w = Floats(args.d_w);
  gradient.precision = precision_of(args);
  gradient.accumulates = args.accumulate != 0;
  gradient.R = s.R;
  gradient.E = s.E;
  gradient.D = s.D;
  gradient.N = s.N;
  return gradient;
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(cuda::Fp8Product(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_cuda_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  const cuda::Fp8Product fp8(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, fp8.workspace.size()));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("grouped_matmul", &device));
  const cudaStream_t stream = cuda::stream_of(exec);
  if (!fp8.wanted) return cuda::compute_rows_product(cuda::rows_product(*args, s), device, stream);
  AB_RETURN_IF_ERROR(fp8.fill(stream));
  return cuda::compute_rows_product(fp8.of(cuda::rows_product(*args, s)), device, stream);
}

ab_status ab_cuda_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                              size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(cuda::workspace_of(cuda::weight_gradient(*args, s)), bytes);
}

ab_status ab_cuda_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  const cuda::WeightGradient gradient = cuda::weight_gradient(*args, s);
  const size_t bytes = cuda::workspace_of(gradient);
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("grouped_matmul_dw", &device));
  void* workspace = bytes == 0 ? nullptr : exec->workspace;
  return cuda::compute_weight_gradient(gradient, workspace, device, cuda::stream_of(exec));
}

}  // extern "C"
