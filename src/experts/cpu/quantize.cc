#include "experts/cpu/quantize.h"

#include <algorithm>
#include <cstring>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "core/threads.h"
#include "experts/block_scale.h"
#include "experts/cpu/product.h"

namespace anabranch {
namespace {

// Copies a block [128, 128] to rows that are `stride` elements apart.
void copy_block(const uint8_t* block, uint8_t* to, int64_t stride) {
  for (int64_t i = 0; i < kScaleBlock; ++i) std::memcpy(to + i * stride, block + i * kScaleBlock, kScaleBlock);
}

// Transposes a block, in squares whose cache lines stay in L1.
void copy_transposed(const uint8_t* block, uint8_t* to, int64_t stride) {
  constexpr int64_t kSquare = 32;
  for (int64_t row = 0; row < kScaleBlock; row += kSquare) {
    for (int64_t j = 0; j < kScaleBlock; ++j) {
      for (int64_t i = row; i < row + kSquare; ++i) to[j * stride + i] = block[i * kScaleBlock + j];
    }
  }
}

// Waking threads costs as much as quantising a few hundred thousand elements.
int threads_for_elements(const ab_exec* exec, double elements) { return elements < 3e5 ? 1 : num_threads(exec); }

}  // namespace

void quantize_rows(int threads, const Matrix& from, int64_t step, int64_t rows, int64_t columns,
                   const QuantizedRows& to) {
  constexpr int64_t kTaskRows = 32;
  const QuantizeKernels& kernels = AB_SELECT_ISA(kQuantize);
  parallel_for(threads, (rows + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t begin = task * kTaskRows;
    kernels.rows(at(from, begin, 0), step, std::min(kTaskRows, rows - begin), columns,
                 {at(to.q, begin, 0), to.power_of_two});
  });
}

void quantize_weights(int threads, const WeightsToQuantize& op) {
  const QuantizeKernels& kernels = AB_SELECT_ISA(kQuantize);
  const QuantizedSizes& s = op.s;
  const int64_t f_blocks = s.F / kScaleBlock;
  const int64_t d_blocks = s.D / kScaleBlock;
  const bool d_inside = s.d_stride == 1 && s.D > 0;
  parallel_for(threads, s.E * d_blocks * s.P * f_blocks, [&](int64_t task, int) {
    const int64_t f = task % f_blocks * kScaleBlock;
    const int64_t p = task / f_blocks % s.P;
    const int64_t d = task / f_blocks / s.P % d_blocks * kScaleBlock;
    const int64_t e = task / f_blocks / s.P / d_blocks;
    const int64_t first = e * s.D * s.P * s.F + d * s.d_stride + p * s.p_stride + f * s.f_stride;
    const char* from = static_cast<const char*>(op.w) + first * dtype_size(op.dtype);
    uint8_t block[kScaleBlock * kScaleBlock];  // [d][f]; [f][d] if D is contiguous in w
    op.scales[task] = kernels.weights(op.dtype, from, d_inside ? s.f_stride : s.d_stride,
                                      d_inside ? s.d_stride : s.f_stride, op.power_of_two, block);
    if (op.q != nullptr) {
      uint8_t* to = op.q + (e * s.D + d) * s.P * s.F + p * s.F + f;
      (d_inside ? copy_transposed : copy_block)(block, to, s.P * s.F);
    }
    if (op.q_transposed != nullptr) {
      uint8_t* to = op.q_transposed + ((e * s.P + p) * s.F + f) * s.D + d;
      (d_inside ? copy_block : copy_transposed)(block, to, s.D);
    }
  });
}

}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  quantize_rows(threads_for_elements(exec, static_cast<double>(s.R) * static_cast<double>(s.D)),
                matrix_of(args->x, 0, s.D), 1, s.R, s.D,
                {quantized_matrix(args->q, args->scales, s.D), args->fp8_scales == AB_FP8_SCALES_POWER_OF_TWO});
  return ok();
}

ab_status ab_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  QuantizedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  const double elements = static_cast<double>(s.E) * static_cast<double>(s.D) * static_cast<double>(s.P * s.F);
  quantize_weights(threads_for_elements(exec, elements),
                   {data<const void>(args->w), args->w->dtype, s, args->fp8_scales == AB_FP8_SCALES_POWER_OF_TWO,
                    data<uint8_t>(args->q), data<uint8_t>(args->q_transposed), data<float>(args->scales)});
  return ok();
}

}  // extern "C"
