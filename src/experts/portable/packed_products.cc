#include "experts/portable/packed_products.h"

#include <algorithm>
#include <cstdint>

#include "experts/packed_value.h"
#include "experts/portable/launchers.h"
#include "experts/portable/products.h"
#include "experts/portable/tile_choice.h"

namespace anabranch::cuda::portable {
namespace {

constexpr const char* kEmpty = "a size is 0";
constexpr const char* kNot16Bits = "the dtype is neither bfloat16 nor float16";
constexpr const char* kNotAligned = "rows or packed weights are not aligned to 16 bytes";
constexpr const char* kTooLarge = "sizes exceed 32-bit indices";
constexpr const char* kSplitsPieces = "a window of columns begins within 16 bytes of packed weights";

// x: rows of k elements.
const char* operands_unsupported_reason(const Floats& x, int64_t R, int64_t k, const PackedMatrices& w, int64_t E) {
  if (std::min({R, E, w.N, w.C}) == 0) return kEmpty;
  if (x.dtype != AB_BFLOAT16 && x.dtype != AB_FLOAT16) return kNot16Bits;
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  if (!is_aligned(x.data) || !is_aligned(w.values) || k % 8 != 0) return kNotAligned;
  // Kernels count rows of all matrices in int32, scales in uint32.
  if (E * w.N > INT32_MAX || E * w.N * (w.C / kMxBlock) > UINT32_MAX) return kTooLarge;
  return nullptr;
}

// Calls f.template operator()<Format, kDtype, kTile>().
template <class F>
ab_status with_kernel(const PackedMatrices& w, int32_t dtype, int64_t R, int64_t E, int64_t columns,
                      int multiprocessors, const F& f) {
  const TileChoice tile = choose_tile(R, E, columns, multiprocessors, 2, Precision::highest);
  const auto with_tile = [&]<class Format, int32_t kDtype>() {
    return tile == TileChoice::small ? f.template operator()<Format, kDtype, TileChoice::small>()
                                     : f.template operator()<Format, kDtype, TileChoice::main>();
  };
  const auto with_dtype = [&]<class Format>() {
    return dtype == AB_BFLOAT16 ? with_tile.template operator()<Format, AB_BFLOAT16>()
                                : with_tile.template operator()<Format, AB_FLOAT16>();
  };
  return w.is_fp4() ? with_dtype.template operator()<Mxfp4>() : with_dtype.template operator()<Fp8Blocks>();
}

}  // namespace

const char* unsupported_reason(const PackedUp& up) {
  if (check(up).code != AB_OK) return kTooLarge;
  return operands_unsupported_reason(up.x, up.s.R, up.s.D, up.packed, up.s.E);
}

const char* unsupported_reason(const PackedIntermediateGradient& g) {
  if (check(g).code != AB_OK) return kTooLarge;
  return operands_unsupported_reason(g.d_y, g.s.R, g.s.D, g.packed, g.s.E);
}

const char* unsupported_reason(const PackedRowsProduct& p) {
  if (check(p).code != AB_OK) return kTooLarge;
  if (!p.transposed && p.first_column % (p.packed.is_fp4() ? 32 : 16) != 0) return kSplitsPieces;
  return operands_unsupported_reason({const_cast<void*>(p.x), p.dtype}, p.R, p.D, p.packed, p.E);
}

ab_status launch_gemm(const PackedUp& up, int multiprocessors, cudaStream_t stream) {
  return with_kernel(up.packed, up.x.dtype, up.s.R, up.s.E, up.s.P * up.s.F, multiprocessors,
                     [&]<class Format, int32_t kDtype, TileChoice kTile>() {
                       return launch_packed_up<Format, kDtype, kTile>(up, multiprocessors, stream);
                     });
}

ab_status launch_gemm(const PackedIntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  return with_kernel(g.packed, g.h.dtype, g.s.R, g.s.E, g.s.F, multiprocessors,
                     [&]<class Format, int32_t kDtype, TileChoice kTile>() {
                       return launch_packed_intermediate_gradient<Format, kDtype, kTile>(g, multiprocessors, stream);
                     });
}

ab_status launch_gemm(const PackedRowsProduct& p, int multiprocessors, cudaStream_t stream) {
  return with_kernel(
      p.packed, p.dtype, p.R, p.E, p.N, multiprocessors, [&]<class Format, int32_t kDtype, TileChoice kTile>() {
        return p.transposed ? launch_packed_rows_product<Format, Major::k, kDtype, kTile>(p, multiprocessors, stream)
                            : launch_packed_rows_product<Format, Major::mn, kDtype, kTile>(p, multiprocessors, stream);
      });
}

}  // namespace anabranch::cuda::portable
