// ab_cuda_grouped_matmul_combine: per chunk of columns, the GEMM over rows, then the sums per token.
#include "experts/cuda/grouped_matmul_combine.h"

#include <algorithm>
#include <mutex>

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "dispatch/columns_from.h"
#include "dispatch/combine.h"
#include "dispatch/sum_tokens.h"
#include "exchange/chunks.h"
#include "experts/column_chunks.h"
#include "experts/cuda/fp8_product.h"
#include "experts/cuda/lora.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/packed.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"

namespace anabranch::cuda {
namespace {

// Returns the address of element `first` of `data`.
void* from(const void* data, int64_t first, int32_t dtype) {
  if (data == nullptr) return nullptr;
  return const_cast<char*>(static_cast<const char*>(data)) + first * dtype_size(dtype);
}

// The GEMM of columns first ... first + columns - 1 of w, into the buffer.
RowsProduct gemm_of(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s, const void* w, int64_t first,
                    int64_t columns, void* buffer) {
  const bool transposed = args.transpose_w != 0;
  const int32_t dtype = s.rows_dtype;
  RowsProduct rows{.x = args.x->data,
                   .w = from(w, transposed ? first * s.D : first, dtype),
                   .transposed = transposed,
                   .group_sizes = data<const int32_t>(args.group_sizes),
                   .y = buffer,
                   .bias = from(data<const void>(args.bias), first, dtype),
                   .map = RowMap(args.slot_of_row, s.T, s.K, s.R),
                   .weight_early = args.weight_early != 0,
                   .dtype = dtype,
                   .precision = precision_of(args),
                   .R = s.R,
                   .E = s.E,
                   .D = s.D,
                   .N = columns,
                   .skips_rest = args.skip_rest != 0,
                   .w_columns = s.N};
  if (rows.weight_early) rows.weights = Floats(args.weights);
  return rows;
}

// The sums per token of those columns.
GatherSum sum_of(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s, int64_t first, int64_t columns,
                 void* buffer) {
  const ab_tensor rows{buffer, s.rows_dtype, 2, {s.R, columns}, nullptr};
  GatherSum sum;
  sum.maps.T = s.T;
  sum.maps.K = s.K;
  sum.maps.R = s.R;
  sum.maps.row_of_slot = data<int32_t>(args.row_of_slot);
  sum.rows = Rows(&rows);
  if (args.weight_early == 0) sum.weights = Floats(args.weights);
  sum.out = columns_from(args.out, first);
  sum.addend = columns_from(args.addend, first);
  return sum;
}

// Sums that return have chunks of their own.
int64_t chunk_of(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s) {
  if (args.returning != nullptr) {
    const int64_t ranks = args.returning->shape.ranks;
    return exchange::return_columns(ranks, s.T / ranks, s.N, dtype_size(args.out->dtype));
  }
  const int64_t columns = combined_columns(s.R, s.E, s.N, s.D, args.backward != 0, is_fp8(args));
  return args.w_block_scales != nullptr && columns < s.N ? whole_packed_tiles(columns) : columns;
}

MaybePacked weights_in(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s) {
  const bool transposed = args.transpose_w != 0;
  const bool reads = transposed && reads_packed(s.R, s.E, s.N, s.D, s.rows_dtype);
  return {args.w, args.w_block_scales, s.E, transposed ? s.N : s.D, transposed ? s.D : s.N, s.rows_dtype, reads};
}

// Sums the chunk that begins at column `first` and returns it. directly: a kernel stores the sums at their ranks. This
// is faster if no GEMM runs beside their pushes.
ab_status sum_and_return(const GatherSum& chunk, int64_t first, bool directly, Return* chunks,
                         const ReturningSums& returning, cudaStream_t stream) {
  GatherSum sum = chunk;
  const int64_t columns = sum.rows.D;
  const int64_t T = sum.maps.T;
  const ab_tensor local{returning.sums + returning.chunk(first), sum.out.dtype, 2, {T, columns}, nullptr};
  sum.out = Rows(&local);
  const bool fits = sum.addend.data == nullptr && reinterpret_cast<uintptr_t>(returning.sums) % 16 == 0 &&
                    fits_token_sums(sum.maps.K, columns, sum.rows.dtype, sum.out.dtype);
  if (fits && directly) {
    AB_RETURN_IF_ERROR(chunks->begin_direct());
    static_assert(exchange::kMaxRanks <= Places::kMost);
    Places places{{}, returning.T, static_cast<int>(returning.ranks())};
    for (int rank = 0; rank < returning.ranks(); ++rank) places.data[rank] = chunks->place(rank, first, columns);
    AB_RETURN_IF_ERROR(compute_token_sums(sum, places, stream));
    return chunks->end_direct(first);
  }
  AB_RETURN_IF_ERROR(fits ? compute_token_sums(sum, {{local.data}, T, 1}, stream) : compute_sum(sum, stream));
  return chunks->push(first, columns);
}

size_t buffer_bytes(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s) {
  return rows_bytes(s.R, chunk_of(args, s), s.rows_dtype);
}

}  // namespace

// The GEMM of a chunk overwrites rows that the sums of the previous chunk read, and it may launch before these have
// finished. This is safe: each kernel waits for the completion of the previous one before its first memory access.
ab_status multiply_and_combine(const ab_grouped_matmul_combine_args& args, const CombinedSizes& s, int64_t columns,
                               void* buffer, const Device& device, cudaStream_t stream, const LowRank& adapter,
                               const Fp8Product<ab_grouped_matmul_combine_args>* fp8, void* unpacked,
                               const ReturningSums* returning) {
  const MaybePacked weights = weights_in(args, s);
  Return chunks(returning, stream);
  for (int64_t first = 0; first < s.N; first += columns) {
    const int64_t count = std::min(columns, s.N - first);
    const auto gemm = [&](const void* w, const ExpertRange& range) {
      RowsProduct rows = gemm_of(args, s, w, first, count, buffer);
      rows.range = range;
      rows.low_rank = adapter;
      const bool k_major = rows.transposed || fp8 != nullptr;
      rows.low_rank.b = from(adapter.b, k_major ? first * adapter.rank : first, rows.dtype);
      return rows;
    };
    const auto multiply = [&](const ExpertRange& range, const void* w) {
      const RowsProduct rows = gemm(w, range);
      return fp8 == nullptr ? compute_rows_product(rows, device, stream)
                            : compute_rows_product(fp8->gemm(rows, first), device, stream);
    };
    const PackedRowsProduct packed{gemm(nullptr, {}), weights.matrices(), first};
    AB_RETURN_IF_ERROR(compute_maybe_packed(weights.is_packed(), packed, device, stream, [&] {
      return weights.for_ranges(unpacked, data<const int32_t>(args.group_sizes), device, stream, multiply);
    }));
    const GatherSum sum = sum_of(args, s, first, count, buffer);
    // The GEMMs of the weight gradients follow the last chunk of a backward pass.
    const bool directly = first + count == s.N && args.backward == 0;
    AB_RETURN_IF_ERROR(returning == nullptr ? compute_sum(sum, stream)
                                            : sum_and_return(sum, first, directly, &chunks, *returning, stream));
  }
  return chunks.end();
}

}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args, const ab_exec* exec,
                                                   size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  CombinedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::Fp8Product fp8(*args, s, nullptr);
  const cuda::ProductAdapter adapter(fp8.workspace, *args, s, s.rows_dtype);
  fp8.workspace.take_bytes(cuda::buffer_bytes(*args, s));
  fp8.workspace.take_bytes(cuda::weights_in(*args, s).scratch_bytes());
  return report_workspace(fp8.workspace.size(), bytes);
}

ab_status ab_cuda_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(args->backward != 0 ? Phase::d_x : Phase::down);
  CombinedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::ReturningSums returning;
  if (args->returning != nullptr) {
    AB_RETURN_IF_ERROR(cuda::describe_returning({"out", "returning", "returning_buffer"}, args->returning,
                                                args->returning_buffer, *args->out, &returning));
  }
  cuda::Fp8Product fp8(*args, s, exec);
  const cuda::ProductAdapter adapter(fp8.workspace, *args, s, s.rows_dtype);
  void* buffer = fp8.workspace.take_bytes(cuda::buffer_bytes(*args, s));
  void* unpacked = fp8.workspace.take_bytes(cuda::weights_in(*args, s).scratch_bytes());
  AB_RETURN_IF_ERROR(check_workspace(exec, fp8.workspace.size()));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("grouped_matmul_combine", &device));
  const cudaStream_t stream = cuda::stream_of(exec);
  if (fp8.enabled) AB_RETURN_IF_ERROR(fp8.fill(stream));
  AB_RETURN_IF_ERROR(adapter.compute(cuda::gemm_of(*args, s, nullptr, 0, s.N, nullptr), device, stream));
  const bool returns = args->returning != nullptr;
  const auto lock = returns ? std::unique_lock(args->returning->calls) : std::unique_lock<std::mutex>();
  return cuda::multiply_and_combine(*args, s, cuda::chunk_of(*args, s), buffer, device, stream, adapter.low_rank(),
                                    fp8.enabled ? &fp8 : nullptr, unpacked, returns ? &returning : nullptr);
}

}  // extern "C"
