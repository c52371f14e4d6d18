// Operands A and B of a grouped GEMM with AB_PRECISION_FP8. Empty with any other precision.
#pragma once

#include "experts/cuda/fp8_operands.h"
#include "experts/precision.h"

namespace anabranch::cuda {

template <class Args>
struct Fp8Product {
  const Args& args;
  GroupedSizes s;
  Workspace workspace;
  bool enabled;
  Fp8Output x8;
  Fp8WeightOperand w;

  Fp8Product(const Args& arguments, const GroupedSizes& sizes, const ab_exec* memory)
      : args(arguments), s(sizes), workspace(memory), enabled(is_fp8(arguments)) {
    if (!enabled) return;
    const bool transposed = args.transpose_w != 0;
    x8 = args.x_scales != nullptr ? Fp8Output{args.x->data, static_cast<float*>(args.x_scales->data)}
                                  : take_fp8_rows(workspace, true, s.R, s.D, uses_power_of_two_scales(args));
    w = Fp8WeightOperand(workspace, args.w, args.w_q, args.w_scales,
                         weights_of(s.E, transposed ? s.N : s.D, 1, transposed ? s.D : s.N, false, false), transposed,
                         uses_power_of_two_scales(args));
  }

  ab_status fill(cudaStream_t stream) const {
    if (args.x_scales == nullptr) AB_RETURN_IF_ERROR(quantize_rows(Floats(args.x), s.R, s.D, x8, stream));
    return w.fill(stream);
  }

  // Adds the quantised operands to a GEMM of the columns from `first` on.
  Fp8RowsProduct gemm(const RowsProduct& product, int64_t first = 0) const {
    return {product, rows_of(x8), w.weights_from(first, s.D)};
  }
};

}  // namespace anabranch::cuda
