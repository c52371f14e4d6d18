#include "anabranch/cuda.h"
#include "core/entry.h"
#include "experts/check.h"
#include "experts/cuda/fp8.h"

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
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return cuda::no_fp8_kernels("q", "float8_e4m3");
}

ab_status ab_cuda_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_cuda_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return cuda::no_fp8_kernels("q", "float8_e4m3");
}

}  // extern "C"
