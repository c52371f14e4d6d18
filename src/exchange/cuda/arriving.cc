#include "exchange/cuda/arriving.h"

#include "core/dtype.h"
#include "core/tensor.h"
#include "exchange/cuda/steps.h"

namespace anabranch::cuda {

ab_status ArrivingTokens::find(const char* name, const ab_exchange* exchange, int32_t buffer, const ab_tensor* tokens,
                               ArrivingTokens* arriving) {
  *arriving = {};
  if (exchange == nullptr) return ok();
  AB_RETURN_IF_ERROR(check_usable(exchange, "arriving"));
  AB_RETURN_IF_ERROR(exchange::check_buffer(buffer, "arriving_buffer"));
  if (tokens == nullptr) return AB_INVALID("%s: got NULL, expected the tokens that arrive", name);
  arriving->exchange_ = exchange;
  arriving->buffer_ = buffer;
  arriving->rows_ = tokens->shape[0];
  arriving->bytes_ = tokens->shape[0] * tokens->shape[1] * dtype_size(tokens->dtype);
  const char* const expected = buffer_of(*exchange, exchange->shape.rank, buffer);
  const int64_t capacity = exchange->shape.buffer_bytes[buffer];
  if (tokens->data != expected || arriving->rows_ % exchange->shape.ranks != 0 || arriving->bytes_ > capacity) {
    return AB_INVALID("%s: got [%lld, %lld] at %p, expected tokens of %d ranks in buffer %d: %lld bytes at %p", name,
                      static_cast<long long>(tokens->shape[0]), static_cast<long long>(tokens->shape[1]), tokens->data,
                      exchange->shape.ranks, buffer, static_cast<long long>(capacity),
                      static_cast<const void*>(expected));
  }
  return ok();
}

ab_status ArrivingTokens::await(uint32_t sources, cudaStream_t stream) const {
  Arrivals arrivals{buffer_, 0, sources};
  arrivals.memory = buffer_of(*exchange_, exchange_->shape.rank, buffer_);
  arrivals.bytes = bytes_;
  return await_arrivals(*exchange_, arrivals, stream);
}

ab_status ArrivingTokens::await_all(cudaStream_t stream) const {
  AB_RETURN_IF_ERROR(await_local_copies(*exchange_, buffer_, stream));
  return await_others(stream);
}

ab_status ArrivingTokens::await_first(cudaStream_t stream) const {
  uint32_t sources = 0;
  for (int64_t s = first_source(); s < end_source(); ++s) sources |= 1u << ((s + ranks()) % ranks());
  AB_RETURN_IF_ERROR(await_local_copies(*exchange_, buffer_, stream));
  return await(sources, stream);
}

ab_status ArrivingTokens::await_others(cudaStream_t stream) const {
  AB_RETURN_IF_ERROR(await(~0u, stream));
  return await_pushes(*exchange_, buffer_, stream);
}

}  // namespace anabranch::cuda
