#include "experts/hopper/fp8_products.h"

#include "experts/block_scale.h"
#include "experts/hopper/launchers.h"
#include "experts/hopper/limits.h"

namespace anabranch::cuda::hopper {
namespace {

// Kernels index scales in uint32.
constexpr int64_t kScaleLimit = int64_t{1} << 32;
constexpr const char* kNotRowsOf16Bit = "rows are float32, not bfloat16 or float16";
constexpr const char* kNotCountedScales = "there are 2^32 or more scales";

// Checks both operands. rows: the number of rows, of k elements each.
const char* operands_unsupported_reason(const Fp8Rows& x, int64_t rows, const Fp8Weights& w, int64_t k) {
  if (rows * (k / kScaleBlock) >= kScaleLimit || w.count >= kScaleLimit) return kNotCountedScales;
  const bool fit = fits_tensor_map(x.values, kPairDtype, k / 2) && fits_tensor_map(w.values, kPairDtype, k / 2);
  return fit ? nullptr : kNotChunks;
}

bool fits_k_major(const LowRank& term, int32_t dtype) { return fits_low_rank(term, dtype, true, 0); }

// Views the values as rows of the dtype of h.
Floats as_16_bit(const void* data, int32_t dtype) { return {const_cast<void*>(data), dtype}; }

}  // namespace

const char* unsupported_reason(const Fp8Up& up) {
  const FfnSizes& s = up.s;
  const int32_t dtype = up.x.dtype;
  if (!is_16_bit(dtype)) return kNotRowsOf16Bit;
  const auto intermediates = {up.b_in, up.h, up.a, as_16_bit(up.a8.values, dtype)};
  if (const char* reason = fused_unsupported_reason(s, up.map, as_16_bit(up.x8.values, dtype), intermediates))
    return reason;
  if (!fits_k_major(up.low_rank, dtype)) return kNotRank;
  return operands_unsupported_reason(up.x8, up.map.sources(), up.w8, s.D);
}

const char* unsupported_reason(const Fp8IntermediateGradient& g) {
  const FfnSizes& s = g.s;
  const int32_t dtype = g.h.dtype;
  if (!is_16_bit(dtype)) return kNotRowsOf16Bit;
  const auto intermediates = {g.h, g.dh, g.weighted_a, as_16_bit(g.dh8.values, dtype)};
  if (const char* reason = fused_unsupported_reason(s, g.map, as_16_bit(g.d_y8.values, dtype), intermediates))
    return reason;
  if (!fits_k_major(g.low_rank, dtype)) return kNotRank;
  return operands_unsupported_reason(g.d_y8, g.map.sources(), g.w8, s.D);
}

const char* unsupported_reason(const Fp8RowsProduct& p) {
  if (!is_16_bit(p.dtype)) return kNotRowsOf16Bit;
  if (!sizes_fit({p.R, p.E, p.D, p.N}) || !tile_count_fits(p.R, p.E, p.N, kMinTileColumns)) return kNotCounted;
  if (!fits_k_major(p.low_rank, p.dtype)) return kNotRank;
  const bool fit = fits_tensor_map(p.y, p.dtype, p.N) && (p.bias == nullptr || fits_tensor_map(p.bias, p.dtype, p.N));
  return fit ? operands_unsupported_reason(p.x8, p.R, p.w8, p.D) : kNotChunks;
}

int64_t num_dot_parts(const Fp8IntermediateGradient& g) { return ceil_div(g.s.F, kFp8TileColumns); }

ab_status launch_gemm(const Fp8Up& up, int multiprocessors, cudaStream_t stream) {
  return with_gate_up_layout(
      up.s, [&]<GateUpLayout kLayout>() { return launch_fp8_up<kLayout>(up, multiprocessors, stream); });
}

ab_status launch_gemm(const Fp8IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  return with_gate_up_layout(g.s, [&]<GateUpLayout kLayout>() {
    return launch_fp8_intermediate_gradient<kLayout>(g, multiprocessors, stream);
  });
}

// The bias is added in the epilogue, together with row weights.
ab_status launch_gemm(const Fp8RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  const bool unweighted = p.weights.data == nullptr && p.bias == nullptr;
  return (unweighted ? launch_fp8_rows_product<RowsEpilogue>
                     : launch_fp8_rows_product<ScaleBiasEpilogue>)(p, multiprocessors, stream);
}

}  // namespace anabranch::cuda::hopper
