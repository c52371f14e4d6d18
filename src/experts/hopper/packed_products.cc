#include "experts/hopper/packed_products.h"

#include "experts/hopper/launchers.h"
#include "experts/hopper/limits.h"
#include "experts/hopper/products.h"
#include "experts/packed_value.h"

namespace anabranch::cuda::hopper {
namespace {

constexpr const char* kNotBFloat16 = "the dtype is not bfloat16";
constexpr const char* kNoKernel = "there is no kernel for these packed weights";
constexpr const char* kNotCountedPieces =
    "packed weights have 2^30 or more columns or more than 2^32 pieces of 16 bytes";
constexpr const char* kNotAlignedPieces = "packed weights are not aligned to 16 bytes";
constexpr const char* kSplitsBlocks = "a window of columns begins within a block";

// Kernels count columns in int32, pieces and scales in uint32.
const char* weights_unsupported_reason(const PackedMatrices& w, int64_t E) {
  const int64_t elements = w.is_fp4() ? 32 : 16;  // per piece
  if (!fits_tensor_map(w.values, kPairDtype, 8)) return kNotAlignedPieces;
  if (E > kMaxCount / w.N || w.C / elements > (int64_t{1} << 32) / (E * w.N)) return kNotCountedPieces;
  return nullptr;
}

// op: up or dh, without weights. transposed: whether k is contiguous in the packed weights of up, or F in those of dh.
template <class Operation>
const char* layer_unsupported_reason(const Operation& op, int32_t dtype, bool transposed,
                                     const PackedMatrices& packed) {
  if (dtype != AB_BFLOAT16) return kNotBFloat16;
  if (const char* reason = unsupported_reason(op)) return reason;
  const GateUpLayout layout = gate_up_layout_of(op.s);
  const bool has_layout = layout == GateUpLayout::gated || (layout == GateUpLayout::interleaved && packed.is_fp4());
  if (!has_layout || !transposed || op.part.bounds != nullptr) return kNoKernel;
  return weights_unsupported_reason(packed, op.s.E);
}

}  // namespace

const char* unsupported_reason(const PackedUp& up) {
  Up plain = up;
  plain.w_in = Floats(nullptr, up.x.dtype);
  return layer_unsupported_reason(plain, up.x.dtype, up.s.layout.in_transposed, up.packed);
}

const char* unsupported_reason(const PackedIntermediateGradient& g) {
  IntermediateGradient plain = g;
  plain.w_out = Floats(nullptr, g.d_y.dtype);
  return layer_unsupported_reason(plain, g.d_y.dtype, g.s.layout.out_transposed, g.packed);
}

const char* unsupported_reason(const PackedRowsProduct& p) {
  RowsProduct plain = p;
  plain.w = nullptr;
  if (p.dtype != AB_BFLOAT16) return kNotBFloat16;
  if (const char* reason = unsupported_reason(plain)) return reason;
  if (p.scales() || p.weighs_bias() || p.thin) return kNoKernel;
  const int64_t columns_of_block = !p.packed.is_fp4() ? kScaleBlock : p.transposed ? 1 : kMxBlock;
  if (p.first_column % columns_of_block != 0) return kSplitsBlocks;
  return weights_unsupported_reason(p.packed, p.E);
}

ab_status launch_gemm(const PackedUp& up, int multiprocessors, cudaStream_t stream) {
  const bool interleaved = gate_up_layout_of(up.s) == GateUpLayout::interleaved;
  const auto launch = !up.packed.is_fp4() ? launch_packed_up<Fp8Blocks, GateUpLayout::gated>
                      : interleaved       ? launch_packed_up<Mxfp4, GateUpLayout::interleaved>
                                          : launch_packed_up<Mxfp4, GateUpLayout::gated>;
  return launch(up, multiprocessors, stream);
}

ab_status launch_gemm(const PackedIntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  const bool interleaved = gate_up_layout_of(g.s) == GateUpLayout::interleaved;
  const auto launch = !g.packed.is_fp4() ? launch_packed_intermediate_gradient<Fp8Blocks, GateUpLayout::gated>
                      : interleaved      ? launch_packed_intermediate_gradient<Mxfp4, GateUpLayout::interleaved>
                                         : launch_packed_intermediate_gradient<Mxfp4, GateUpLayout::gated>;
  return launch(g, multiprocessors, stream);
}

ab_status launch_gemm(const PackedRowsProduct& p, int multiprocessors, cudaStream_t stream) {
  const auto with_major = [&]<Major kMajor>() {
    const auto launch =
        p.packed.is_fp4() ? launch_packed_rows_product<Mxfp4, kMajor> : launch_packed_rows_product<Fp8Blocks, kMajor>;
    return launch(p, multiprocessors, stream);
  };
  return p.transposed ? with_major.operator()<Major::k>() : with_major.operator()<Major::mn>();
}

}  // namespace anabranch::cuda::hopper
