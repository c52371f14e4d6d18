#include "exchange/cuda/returning.h"

#include <algorithm>

#include "core/dtype.h"
#include "core/tensor.h"
#include "dispatch/columns_from.h"
#include "exchange/chunks.h"
#include "exchange/cuda/kernels.h"
#include "exchange/cuda/steps.h"
#include "exchange/cuda/sum.h"

namespace anabranch::cuda {
int64_t ReturningSums::chunk(int64_t first) const { return ranks() * T * first * dtype_size(dtype); }
int64_t ReturningSums::block(int64_t rank, int64_t chunk_columns) const {
  return rank * T * chunk_columns * dtype_size(dtype);
}

ab_status describe_returning(const ReturnNames& names, const ab_exchange* exchange, int32_t buffer,
                             const ab_tensor& sums, ReturningSums* returning) {
  AB_RETURN_IF_ERROR(check_usable(exchange, names.exchange));
  AB_RETURN_IF_ERROR(exchange::check_buffer(buffer, names.buffer));
  const char* const name = names.sums;
  const int64_t ranks = exchange->shape.ranks;
  if (sums.shape[0] % ranks != 0) {
    return AB_INVALID("%s: got %lld rows, expected a multiple of the ranks P=%lld", name,
                      static_cast<long long>(sums.shape[0]), static_cast<long long>(ranks));
  }
  *returning = {exchange, buffer, sums.shape[0] / ranks, sums.shape[1], sums.dtype, 0, static_cast<char*>(sums.data)};
  returning->columns = exchange::return_columns(ranks, returning->T, returning->D, dtype_size(sums.dtype));
  AB_RETURN_IF_ERROR(exchange::check_block_bytes(name, returning->block(1, returning->D)));
  const int64_t bytes = returning->chunk(returning->D);
  if (bytes > exchange->shape.buffer_bytes[buffer]) {
    return AB_INVALID("%s: got %lld bytes, expected at most the %lld bytes of buffer %d", name,
                      static_cast<long long>(bytes), static_cast<long long>(exchange->shape.buffer_bytes[buffer]),
                      buffer);
  }
  return ok();
}

namespace {

int phase_of(const ReturningSums& r, int64_t first) { return static_cast<int>(first / r.columns); }

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

ab_status sum_chunks(const ReturningSums& r, float factor, const ab_tensor* addend, const ab_tensor& out,
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
    AB_RETURN_IF_ERROR(
        launch_sum({Rows(&arrived), r.sums + r.chunk(first) + r.block(rank, columns), rank, r.exchange->shape.ranks,
                    r.T, factor, columns_from(&out, first), columns_from(addend, first)},
                   stream));
  }
  return release_use(*r.exchange, r.buffer, stream);
}

}  // namespace

ab_status Return::begin() {
  if (has_begun_) return ok();
  has_begun_ = true;
  AB_RETURN_IF_ERROR(fork(*sums_->exchange, stream_));  // for end() without a push
  const int64_t bytes = sums_->block(1, sums_->D);
  return begin_use(*sums_->exchange, sums_->buffer, exchange::Operation::returned_sums, bytes, stream_);
}

ab_status Return::push(int64_t first, int64_t columns) {
  AB_RETURN_IF_ERROR(begin());
  return push_chunk(*sums_, first, columns, stream_);
}

void* Return::place(int rank, int64_t first, int64_t columns) const {
  const exchange::Shape& shape = sums_->exchange->shape;
  if (rank == shape.rank) return sums_->sums + sums_->chunk(first) + sums_->block(rank, columns);
  return buffer_of(*sums_->exchange, rank, sums_->buffer) + sums_->chunk(first) + sums_->block(shape.rank, columns);
}

ab_status Return::end_direct(int64_t first) {
  return launch_signal(sums_->exchange->group, sums_->buffer, phase_of(*sums_, first), stream_);
}

ab_status Return::end() {
  if (!has_begun_) return ok();
  has_begun_ = false;
  return end_copies(*sums_->exchange, sums_->buffer);
}

Return::~Return() {
  if (!has_begun_) return;
  if (end().code == AB_OK) join(*sums_->exchange, sums_->buffer, stream_);
}

ab_status sum_returned(const ReturningSums& r, float factor, const ab_tensor* addend, const ab_tensor& out,
                       cudaStream_t stream) {
  const ab_status status = sum_chunks(r, factor, addend, out, stream);
  const ab_status joined = join(*r.exchange, r.buffer, stream);
  return status.code == AB_OK ? joined : status;
}

}  // namespace anabranch::cuda
