// Tokens [P T, D] that a started all_gather is sending to a buffer, for a call that reads them there. Such a call
// replaces part AB_EXCHANGE_FINISH of the all_gather. It may begin with the tokens of the sources that arrive first.
// Tokens that are overwritten after the wait, because the exchange broke, are not noticed: the next call reports it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "anabranch/types.h"
#include "exchange/cuda/exchange.h"

namespace anabranch::cuda {

class ArrivingTokens {
 public:
  // No tokens arrive; the waits do nothing.
  ArrivingTokens() = default;

  // The tokens that arrive in a buffer of an exchange; exchange NULL: none do. The name is that of the argument.
  static ab_status find(const char* name, const ab_exchange* exchange, int32_t buffer, const ab_tensor* tokens,
                        ArrivingTokens* arriving);

  explicit operator bool() const { return exchange_ != nullptr; }

  // Waits on `stream` for all tokens.
  ab_status await_all(cudaStream_t stream) const;

  // In two steps. The first waits for the sources from first_source() to end_source(), counted modulo P.
  ab_status await_first(cudaStream_t stream) const;
  ab_status await_others(cudaStream_t stream) const;

  int64_t ranks() const { return exchange_->shape.ranks; }
  int64_t tokens_per_source() const { return rows_ / ranks(); }
  int64_t bytes_from_peers() const { return bytes_ / ranks() * (ranks() - 1); }

  // This rank, and the ranks that push to it first, as long as these are at most half of all.
  int64_t first_source() const { return exchange_->shape.rank + 1 - first_sources(); }
  int64_t end_source() const { return exchange_->shape.rank + 1; }

 private:
  int64_t first_sources() const { return ranks() < 4 ? 1 : ranks() / 2; }
  ab_status await(uint32_t sources, cudaStream_t stream) const;

  const ab_exchange* exchange_ = nullptr;
  int buffer_ = 0;
  int64_t rows_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace anabranch::cuda
