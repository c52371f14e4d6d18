// Upper bounds of the CUDA workspaces, computed by the functions that lay out the workspaces.
#include "anabranch/cuda_workspaces.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "balance/token_tiles.h"
#include "core/ieee.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "dispatch/workspace_sizes.h"
#include "exchange/chunks.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "router/token_scale.h"

namespace anabranch::cuda {
namespace {

using Array = std::initializer_list<Axis>;

// Checks the axes of an array of 4-byte elements, the largest element size in any of the bounds.
ab_status check_array(const Array& axes) {
  int64_t bytes = 4;
  for (const auto& [name, size] : axes) {
    if (size < 0) return AB_INVALID("%s: got %lld, expected 0 or more", name, static_cast<long long>(size));
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes) || bytes > kMaxBytes) {
      return AB_INVALID("%s: got %lld, expected sizes whose product is at most 2^56 bytes", name,
                        static_cast<long long>(size));
    }
  }
  return ok();
}

ab_status check_float(const char* name, int32_t dtype) {
  if (dtype == AB_FLOAT32 || dtype == AB_BFLOAT16 || dtype == AB_FLOAT16) return ok();
  return AB_INVALID("%s: got ab_dtype %d, expected float16, bfloat16 or float32", name, dtype);
}

// Checks the axes of the arrays and writes bound() to *bytes.
template <class Bound>
ab_status report_bound(std::initializer_list<Array> arrays, size_t* bytes, const Bound& bound) {
  const ScopedIeeeArithmetic ieee;
  if (bytes == nullptr) return AB_INVALID("bytes: got NULL, expected a pointer to a size_t");
  for (const Array& array : arrays) AB_RETURN_IF_ERROR(check_array(array));
  return report_workspace(bound(), bytes);
}

// Holds for a gradient of each expert and for one that all experts share.
size_t weight_gradient_bound(int64_t R, int64_t E, int64_t D, int64_t N) {
  return std::max(weight_gradient_bytes(R, E, D, N), weight_gradient_bytes(R, E, D, N, true));
}

// Operands of two dtypes are converted to float32, and d_w may have a third dtype.
size_t weight_gradient_bound(int64_t R, int64_t E, int64_t D, int64_t N, int32_t x_dtype, int32_t d_y_dtype) {
  Workspace workspace;
  if (x_dtype != d_y_dtype) {
    for (const auto& [rows, columns] : {std::pair{R, D}, {R, N}, {std::max<int64_t>(E, 1) * D, N}}) {
      workspace.take_rows(rows, columns, AB_FLOAT32);
    }
  }
  workspace.take_bytes(weight_gradient_bound(R, E, D, N));
  return workspace.size();
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_statistics_workspace_bound(int64_t T, int64_t B, int64_t E, size_t* bytes) {
  return cuda::report_bound({{{"T", T}, {"E", E}}, {{"B", B}, {"E", E}}}, bytes,
                            [&] { return cuda::max_partials_bytes(T, B, E); });
}

ab_status ab_cuda_quantile_workspace_bound(int64_t T, size_t* bytes) {
  return cuda::report_bound({{{"T", T}}}, bytes, [&] { return cuda::token_scale_bytes(T); });
}

ab_status ab_cuda_plan_workspace_bound(int64_t slots, int64_t E, size_t* bytes) {
  return cuda::report_bound({{{"slots", slots}}, {{"E", E}}}, bytes,
                            [&] { return cuda::plan_bytes(cuda::SlotBlocks(slots, E), E); });
}

ab_status ab_cuda_sort_chunks_workspace_bound(int64_t S, size_t* bytes) {
  return cuda::report_bound({{{"S", S}}}, bytes, [&] { return cuda::sort_chunks_bytes(S); });
}

ab_status ab_cuda_grouped_matmul_dw_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N, int32_t x_dtype,
                                                    int32_t d_y_dtype, size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("x_dtype", x_dtype));
  AB_RETURN_IF_ERROR(cuda::check_float("d_y_dtype", d_y_dtype));
  return cuda::report_bound({{{"R", R}, {"D", D}}, {{"R", R}, {"N", N}}, {{"E", E}, {"D", D}, {"N", N}}}, bytes,
                            [&] { return cuda::weight_gradient_bound(R, E, D, N, x_dtype, d_y_dtype); });
}

ab_status ab_cuda_grouped_matmul_combine_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N, int32_t backward,
                                                         int32_t dtype, size_t* bytes) {
  const bool fp8 = dtype == AB_FLOAT8_E4M3;
  if (!fp8) AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  return cuda::report_bound({{{"R", R}, {"D", D}}, {{"R", R}, {"N", N}}, {{"E", E}, {"D", D}, {"N", N}}}, bytes, [&] {
    return cuda::rows_bytes(R, cuda::combined_columns(R, E, N, D, backward != 0, fp8), fp8 ? AB_BFLOAT16 : dtype);
  });
}

ab_status ab_cuda_returning_workspace_bound(int64_t R, int64_t P, int64_t T, int64_t N, int32_t dtype, size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  return cuda::report_bound({{{"R", R}, {"N", N}}, {{"P", P}, {"T", T}, {"N", N}}}, bytes, [&] {
    return cuda::rows_bytes(R, exchange::return_columns(P, T, N, dtype_size(dtype)), dtype);
  });
}

ab_status ab_cuda_arriving_workspace_bound(int64_t E, size_t* bytes) {
  return cuda::report_bound({{{"E", E}}}, bytes, [&] {
    Workspace workspace;
    workspace.take<int32_t>(2 * E);
    return workspace.size();
  });
}

ab_status ab_cuda_fp8_rows_workspace_bound(int64_t R, int64_t D, size_t* bytes) {
  return cuda::report_bound({{{"R", R}, {"D", D}}}, bytes, [&] { return cuda::fp8_rows_bytes(R, D); });
}

ab_status ab_cuda_lora_workspace_bound(int64_t R, int64_t E, int64_t M, int64_t N, int64_t r, int32_t backward,
                                       int32_t dtype, size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  return cuda::report_bound(
      {{{"E", E}, {"M", M}, {"r", r}}, {{"E", E}, {"r", r}, {"N", N}}, {{"R", R}, {"r", r}}}, bytes, [&] {
        const int64_t matrices = std::max<int64_t>(E, 1);  // at least one, which experts may share
        Workspace workspace;
        workspace.take_rows(matrices * M, r, dtype);
        workspace.take_rows(matrices * r, N, dtype);
        workspace.take_rows(R, r, dtype);
        if (const int64_t padded = cuda::padded_rank(r); padded != r) {  // copies for FP8 GEMMs
          workspace.take_rows(R, padded, dtype);
          workspace.take_rows(matrices * std::max(M, N), padded, dtype);
        }
        if (backward == 0) return workspace.size();
        workspace.take_rows(R, r, dtype);
        workspace.take_rows(matrices * r, N, AB_FLOAT32);  // a gradient whose columns are reordered
        workspace.take_bytes(
            std::max(cuda::weight_gradient_bound(R, E, M, r), cuda::weight_gradient_bound(R, E, r, N)));
        size_t parts = 0;  // of v_in, whose GEMM reads N columns, or of z with M columns
        for (const int64_t columns : {M, N}) {
          if (cuda::may_pair(R, E, columns, r, dtype)) parts = std::max(parts, cuda::pair_bytes(R, columns, r));
        }
        workspace.take_bytes(parts);
        return workspace.size();
      });
}

ab_status ab_cuda_unpacked_workspace_bound(int64_t R, int64_t E, int64_t N, int64_t C, int32_t backward, int32_t dtype,
                                           size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  return cuda::report_bound({{{"R", R}}, {{"E", E}, {"N", N}, {"C", C}}}, bytes, [&] {
    return backward == 0 && cuda::reads_packed(R, E, N, C, dtype) ? 0 : cuda::unpacked_bytes(E, N, C, dtype);
  });
}

ab_status ab_cuda_expert_ffn_forward_workspace_bound(int64_t R, int64_t F, int32_t dtype, size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  return cuda::report_bound({{{"R", R}, {"F", F}}}, bytes, [&] { return cuda::rows_bytes(R, F, dtype); });
}

ab_status ab_cuda_expert_ffn_backward_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t P, int64_t F,
                                                      int32_t dtype, int32_t d_dtype, int32_t needs, size_t* bytes) {
  AB_RETURN_IF_ERROR(cuda::check_float("dtype", dtype));
  AB_RETURN_IF_ERROR(cuda::check_float("d_dtype", d_dtype));
  constexpr int32_t kNeeds =
      AB_CUDA_NEED_WEIGHTED_A | AB_CUDA_NEED_D_WEIGHTS | AB_CUDA_NEED_D_W_OUT | AB_CUDA_NEED_D_W_IN;
  if ((needs & ~kNeeds) != 0) return AB_INVALID("needs: got %d, expected 0 to %d", needs, kNeeds);
  return cuda::report_bound(
      {{{"R", R}, {"D", D}}, {{"R", R}, {"P", P}, {"F", F}}, {{"E", E}, {"D", D}, {"P", P}, {"F", F}}}, bytes, [&] {
        const int64_t N = P * F;
        Workspace workspace;
        if ((needs & AB_CUDA_NEED_WEIGHTED_A) != 0) workspace.take_rows(R, F, dtype);
        if (d_dtype != dtype) workspace.take_rows(R, D, dtype);
        size_t step = 0;  // the largest step: steps run one after the other
        if ((needs & AB_CUDA_NEED_D_WEIGHTS) != 0) step = cuda::dots_bytes(R, F);
        if ((needs & AB_CUDA_NEED_D_W_OUT) != 0) {
          step = std::max({step, cuda::weight_gradient_bytes(R, E, F, D), cuda::bias_gradient_bytes(R, E, D)});
        }
        if ((needs & AB_CUDA_NEED_D_W_IN) != 0) {
          step = std::max({step, cuda::weight_gradient_bytes(R, E, D, N), cuda::bias_gradient_bytes(R, E, N)});
        }
        workspace.take_bytes(step);
        return workspace.size();
      });
}

}  // extern "C"
