// Stubs for the Hopper kernels, which the emulator does not support.
#include "core/status.h"
#include "experts/hopper/fp8_products.h"
#include "experts/hopper/packed_products.h"
#include "experts/hopper/products.h"

namespace anabranch::cuda::hopper {
namespace {

constexpr const char* kReason = "the device is emulated";
ab_status refused() { return error(AB_INTERNAL, "%s", kReason); }

}  // namespace

const char* unsupported_reason(const Up&) { return kReason; }
const char* unsupported_reason(const RowsProduct&) { return kReason; }
const char* unsupported_reason(const IntermediateGradient&) { return kReason; }
const char* unsupported_reason(const WeightGradient&) { return kReason; }
const char* unsupported_reason(const FactorPair&) { return kReason; }
bool takes_parts(const Up&) { return false; }
bool takes_parts(const IntermediateGradient&) { return false; }
TileChoice choose_tile(const Up&, int) { return {}; }
TileChoice choose_tile(const RowsProduct&, int) { return {}; }
TileChoice choose_tile(const IntermediateGradient&, int) { return {}; }
TileChoice choose_tile(const WeightGradient&, int) { return {}; }
int64_t num_dot_parts(const IntermediateGradient&) { return 0; }
ab_status launch_gemm(const Up&, TileChoice, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const RowsProduct&, TileChoice, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const IntermediateGradient&, TileChoice, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const WeightGradient&, TileChoice, void*, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const FactorPair&, void*, int, cudaStream_t) { return refused(); }

const char* unsupported_reason(const PackedUp&) { return kReason; }
const char* unsupported_reason(const PackedIntermediateGradient&) { return kReason; }
const char* unsupported_reason(const PackedRowsProduct&) { return kReason; }
ab_status launch_gemm(const PackedUp&, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const PackedIntermediateGradient&, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const PackedRowsProduct&, int, cudaStream_t) { return refused(); }

const char* unsupported_reason(const Fp8Up&) { return kReason; }
const char* unsupported_reason(const Fp8RowsProduct&) { return kReason; }
const char* unsupported_reason(const Fp8IntermediateGradient&) { return kReason; }
int64_t num_dot_parts(const Fp8IntermediateGradient&) { return 0; }
ab_status launch_gemm(const Fp8Up&, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const Fp8RowsProduct&, int, cudaStream_t) { return refused(); }
ab_status launch_gemm(const Fp8IntermediateGradient&, int, cudaStream_t) { return refused(); }

}  // namespace anabranch::cuda::hopper
