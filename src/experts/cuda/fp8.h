// What a GPU has no kernels for.
#pragma once

#include "core/status.h"
#include "experts/precision.h"

namespace anabranch::cuda {

inline ab_status no_fp8_kernels(const char* argument, const char* got) {
  return error(AB_UNSUPPORTED,
               "%s: got %s, expected another one: FP8 runs on the CPU alone, there are no kernels of a GPU", argument,
               got);
}

template <class Args>
ab_status refuse_fp8(const Args& args) {
  return is_fp8(args) ? no_fp8_kernels("precision", "AB_PRECISION_FP8") : ok();
}

}  // namespace anabranch::cuda
