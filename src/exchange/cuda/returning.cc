#include "exchange/cuda/returning.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/tensor.h"
#include "exchange/chunks.h"
#include "exchange/cuda/steps.h"
#include "exchange/cuda/sum.h"

namespace anabranch::cuda {
namespace {

// The columns from `first` on of rows.
Rows window(const ab_tensor* tensor, int64_t first) {
  Rows rows(tensor);
  if (rows.data != nullptr) rows.data += first * dtype_size(rows.dtype);
  return rows;
}

int phase_of(const ReturningSums& r, int64_t first) { return static_cast<int>(first / r.columns); }

}  // namespace

int64_t ReturningSums::chunk(int64_t first) const { return ranks() * T * first * dtype_size(dtype); }
int64_t ReturningSums::block(int64_t rank, int64_t chunk_columns) const {
  return rank * T * chunk_columns * dtype_size(dtype);
}

ab_status describe_returning(const char* name, const ab_exchange* exchange, int32_t buffer, const ab_tensor& sums,
                             ReturningSums* returning) {
  AB_RETURN_IF_ERROR(check_usable(exchange));
  AB_RETURN_IF_ERROR(exchange::check_buffer(buffer));
  const int64_t ranks = exchange->shape.ranks;
  if (sums.shape[0] % ranks != 0) {
    return AB_INVALID("%s: got %lld rows, expected a multiple of the ranks P=%lld", name,
                      static_cast<long long>(sums.shape[0]), static_cast<long long>(ranks));
  }
  *returning = {exchange, buffer, sums.shape[0] / ranks, sums.shape[1], sums.dtype, 0, static_cast<char*>(sums.data)};
  returning->columns = exchange::return_columns(ranks, returning->T, returning->D, dtype_size(sums.dtype));
  const int64_t bytes = returning->chunk(returning->D);
  if (bytes > exchange->shape.buffer_bytes[buffer]) {
    return AB_INVALID("%s: got %lld bytes, expected at most the %lld bytes of buffer %d", name,
                      static_cast<long long>(bytes), static_cast<long long>(exchange->shape.buffer_bytes[buffer]),
                      buffer);
  }
  return ok();
}

ab_status begin_return(const ReturningSums& r, cudaStream_t stream) {
  return begin_use(*r.exchange, r.buffer, exchange::Operation::all_to_all, r.block(1, r.D), stream);
}

ab_status push_chunk(const ReturningSums& r, int64_t first, int64_t columns, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(fork(*r.exchange, stream));
  const int64_t bytes = r.block(1, columns);
  for (int step = 1; step < r.exchange->shape.ranks; ++step) {
    const int to = push_order(*r.exchange, step);
    const int64_t place = r.chunk(first) + r.block(r.exchange->shape.rank, columns);
    AB_RETURN_IF_ERROR(push(*r.exchange, r.buffer, to, place, r.sums + r.chunk(first) + r.block(to, columns), bytes));
    AB_RETURN_IF_ERROR(signal(*r.exchange, r.buffer, phase_of(r, first), to));
  }
  return ok();
}

ab_status end_return(const ReturningSums& r) { return end_copies(*r.exchange, r.buffer); }

ab_status sum_returned(const ReturningSums& r, float factor, const ab_tensor* addend, const ab_tensor& out,
                       cudaStream_t stream) {
  const int rank = r.exchange->shape.rank;
  char* const buffer = buffer_of(*r.exchange, rank, r.buffer);
  for (int64_t first = 0; first < r.D; first += r.columns) {
    const int64_t columns = std::min(r.columns, r.D - first);
    char* const chunk = buffer + r.chunk(first);
    Arrivals arrivals{r.buffer, phase_of(r, first)};
    arrivals.memory = chunk;
    arrivals.bytes = r.block(r.ranks(), columns);
    AB_RETURN_IF_ERROR(await_arrivals(*r.exchange, arrivals, stream));
    const ab_tensor arrived{chunk, r.dtype, 2, {r.ranks() * r.T, columns}, nullptr};
    AB_RETURN_IF_ERROR(launch_sum({Rows(&arrived), r.sums + r.chunk(first) + r.block(rank, columns), rank,
                                   r.exchange->shape.ranks, r.T, factor, window(&out, first), window(addend, first)},
                                  stream));
  }
  AB_RETURN_IF_ERROR(release_use(*r.exchange, r.buffer, stream));
  AB_RETURN_IF_ERROR(await_local_copies(*r.exchange, r.buffer, stream));
  return await_pushes(*r.exchange, r.buffer, stream);
}

}  // namespace anabranch::cuda
