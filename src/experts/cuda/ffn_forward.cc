// ab_cuda_expert_ffn_forward: up, then down; or up alone.
#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/fp8.h"
#include "experts/cuda/path.h"
#include "experts/cuda/rows_product.h"
#include "experts/cuda/up.h"

namespace anabranch::cuda {
namespace {

struct Forward {
  const ab_expert_ffn_forward_args& args;
  FfnSizes s;
  RowMap map;
  Workspace workspace;
  Floats a;  // [R, F]

  Forward(const ab_expert_ffn_forward_args& arguments, const FfnSizes& sizes, const ab_exec* memory)
      : args(arguments),
        s(sizes),
        map(args.slot_of_row, s.T, s.K, s.R),
        workspace(memory),
        a(args.a != nullptr ? Floats(args.a) : row_buffer(s.F)) {}

  Floats row_buffer(int64_t columns) { return {workspace.take_rows(s.R, columns, args.x->dtype), args.x->dtype}; }

  Up up() const {
    Up up;
    up.s = s;
    up.map = map;
    up.group_sizes = data<const int32_t>(args.group_sizes);
    up.activation = activation_of(args.activation, args.activation_alpha, args.activation_limit);
    up.precision = precision_of(args);
    up.skips_rest = args.skip_rest != 0;
    up.x = Floats(args.x);
    up.w_in = Floats(args.w_in);
    up.b_in = Floats(args.b_in);
    if (args.weight_early != 0) up.weights = Floats(args.weights);
    up.h = Floats(args.h);
    up.a = a;
    return up;
  }

  RowsProduct down() const {
    return {.x = a.data,
            .w = args.w_out->data,
            .transposed = s.layout.out_transposed,
            .group_sizes = data<const int32_t>(args.group_sizes),
            .y = args.y->data,
            .bias = data<const void>(args.b_out),
            .map = map,
            .weights = Floats(args.weights),
            .weight_early = args.weight_early != 0,
            .dtype = a.dtype,
            .precision = precision_of(args),
            .R = s.R,
            .E = s.E,
            .D = s.F,
            .N = s.D};
  }
};

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                               size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(cuda::refuse_fp8(*args));
  return report_workspace(cuda::Forward(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_cuda_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(cuda::refuse_fp8(*args));
  const cuda::Forward op(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("expert_ffn_forward", &device));
  const cudaStream_t stream = cuda::stream_of(exec);
  AB_RETURN_IF_ERROR(cuda::compute_up(op.up(), device, stream));
  return args->y == nullptr ? ok() : cuda::compute_rows_product(op.down(), device, stream);
}

}  // extern "C"
