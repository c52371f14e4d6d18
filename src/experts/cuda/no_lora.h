// Refuses adapters, which the CUDA kernels do not compute.
#pragma once

#include "core/status.h"
#include "experts/check.h"

namespace anabranch::cuda {

inline ab_status refuse_lora(const GroupedSizes& s) {
  if (s.rank == 0) return ok();
  return error(AB_UNSUPPORTED, "lora_b: got an adapter, expected none: the CUDA kernels do not compute adapters");
}
inline ab_status refuse_lora(const FfnSizes& s) {
  if (s.rank_in == 0 && s.rank_out == 0) return ok();
  return error(AB_UNSUPPORTED, "lora: got adapters, expected none: the CUDA kernels do not compute adapters");
}
inline ab_status refuse_shared_gradient(const ab_tensor& d_w, int64_t E) {
  if (d_w.shape[0] == E) return ok();
  return error(AB_UNSUPPORTED, "d_w: got one matrix for %lld experts, expected E: the CUDA kernels do not sum it",
               static_cast<long long>(E));
}

}  // namespace anabranch::cuda
