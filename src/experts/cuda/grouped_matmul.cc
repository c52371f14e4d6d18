// ab_cuda_grouped_matmul, ab_cuda_grouped_matmul_dw.
#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/convert.h"
#include "experts/cuda/fp8_product.h"
#include "experts/cuda/lora.h"
#include "experts/cuda/ops/workspace_sizes.h"
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

// Weight-gradient GEMMs take x and d_y of one dtype and return d_w in that dtype or in float32. If x and d_y differ in
// dtype, they are converted to float32, which is exact. If d_w has a third dtype, it is computed in float32 and rounded
// afterwards.
struct GroupedMatmulDw {
  const ab_grouped_matmul_dw_args& args;
  GroupedSizes s;
  Workspace workspace;
  Floats x;
  Floats d_y;
  Floats d_w;
  void* scratch;

  GroupedMatmulDw(const ab_grouped_matmul_dw_args& arguments, const GroupedSizes& sizes, const ab_exec* memory)
      : args(arguments), s(sizes), workspace(memory), x(args.x), d_y(args.d_y), d_w(args.d_w) {
    const int32_t dtype = x.dtype == d_y.dtype ? x.dtype : int32_t{AB_FLOAT32};
    if (x.dtype != dtype) x = in_float32(s.R, s.D);
    if (d_y.dtype != dtype) d_y = in_float32(s.R, s.N);
    if (d_w.dtype != dtype && d_w.dtype != AB_FLOAT32) d_w = in_float32(matrices() * s.D, s.N);
    scratch = workspace.take_bytes(weight_gradient_bytes(s.R, s.E, s.D, s.N, is_shared()));
  }

  int64_t matrices() const { return args.d_w->shape[0]; }
  bool is_shared() const { return matrices() != s.E; }

  Floats in_float32(int64_t rows, int64_t columns) {
    return {workspace.take_rows(rows, columns, AB_FLOAT32), AB_FLOAT32};
  }

  WeightGradient gradient() const {
    WeightGradient gradient;
    gradient.x = x;
    gradient.d_y = d_y;
    gradient.group_sizes = data<const int32_t>(args.group_sizes);
    gradient.d_w = d_w;
    gradient.precision = precision_of(args);
    gradient.accumulates = args.accumulate != 0;
    gradient.shared = is_shared();
    gradient.R = s.R;
    gradient.E = s.E;
    gradient.D = s.D;
    gradient.N = s.N;
    return gradient;
  }

  ab_status run(const Device& device, cudaStream_t stream) const {
    const auto convert_to = [&](const Floats& from, const Floats& to, int64_t count) {
      return from.dtype == to.dtype ? ok() : convert(from, to, count, device.multiprocessors, stream);
    };
    AB_RETURN_IF_ERROR(convert_to(Floats(args.x), x, s.R * s.D));
    AB_RETURN_IF_ERROR(convert_to(Floats(args.d_y), d_y, s.R * s.N));
    AB_RETURN_IF_ERROR(compute_weight_gradient(gradient(), scratch, device, stream));
    return convert_to(d_w, Floats(args.d_w), matrices() * s.D * s.N);
  }
};

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::Fp8Product fp8(*args, s, nullptr);
  const cuda::ProductAdapter adapter(fp8.workspace, *args, s, args->y->dtype);
  return report_workspace(fp8.workspace.size(), bytes);
}

ab_status ab_cuda_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::grouped_matmul);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::Fp8Product fp8(*args, s, exec);
  const cuda::ProductAdapter adapter(fp8.workspace, *args, s, args->y->dtype);
  AB_RETURN_IF_ERROR(check_workspace(exec, fp8.workspace.size()));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("grouped_matmul", &device));
  const cudaStream_t stream = cuda::stream_of(exec);
  cuda::RowsProduct product = cuda::rows_product(*args, s);
  if (fp8.enabled) AB_RETURN_IF_ERROR(fp8.fill(stream));
  AB_RETURN_IF_ERROR(adapter.compute(product, device, stream));
  product.low_rank = adapter.low_rank();
  return fp8.enabled ? cuda::compute_rows_product(fp8.gemm(product), device, stream)
                     : cuda::compute_rows_product(product, device, stream);
}

ab_status ab_cuda_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                              size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(cuda::GroupedMatmulDw(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_cuda_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::grouped_matmul);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  const cuda::GroupedMatmulDw op(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("grouped_matmul_dw", &device));
  return op.run(device, cuda::stream_of(exec));
}

}  // extern "C"
