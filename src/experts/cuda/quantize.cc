#include "anabranch/cuda.h"
#include "core/cuda/device.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "experts/check.h"
#include "experts/cuda/fp8_operands.h"

using namespace anabranch;

extern "C" {

ab_status ab_cuda_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_cuda_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::quantize);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  if (s.R * s.D == 0) return ok();
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device("quantize_rows", &device));
  return cuda::quantize_rows(
      Floats(args->x), s.R, s.D,
      {args->q->data, static_cast<float*>(args->scales->data), cuda::uses_power_of_two_scales(*args)},
      cuda::stream_of(exec));
}

ab_status ab_cuda_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_cuda_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::quantize);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  if (s.E * s.D * s.P * s.F == 0) return ok();
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device("quantize_weights", &device));
  return cuda::quantize_weights(Floats(args->w), s, data<void>(args->q), data<void>(args->q_transposed),
                                static_cast<float*>(args->scales->data), cuda::uses_power_of_two_scales(*args),
                                cuda::stream_of(exec));
}

}  // extern "C"
