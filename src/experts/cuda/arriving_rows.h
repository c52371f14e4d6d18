// GEMMs over rows of tokens that are still arriving from peers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cuda/device.h"
#include "exchange/cuda/arriving.h"
#include "experts/check.h"
#include "experts/cuda/ops/row_part.h"
#include "experts/cuda/path.h"
#include "experts/cuda/source_bounds.h"

namespace anabranch::cuda {

// Whether computing in two parts is faster: the second launch costs about 25 us. hidden_bytes: the bytes that arrive
// during other work, without the split.
inline bool pays_to_split(const ArrivingTokens& arriving, int64_t hidden_bytes) {
  constexpr int64_t kBytes = 16 << 20;  // about 45 us over NVLink
  return arriving.bytes_from_peers() > hidden_bytes + kBytes;
}

// Runs an operation on gathered rows (Up, IntermediateGradient) when they have arrived, in two parts if its kernel can
// and `splits` is set. bounds: memory for [E, 2] int32. compute(operation) enqueues the kernel.
template <class Operation, class Compute>
ab_status compute_when_arrived(const Operation& operation, const ArrivingTokens& arriving, bool splits, int32_t* bounds,
                               const Device& device, cudaStream_t stream, const Compute& compute) {
  const bool takes_parts =
      choose_path(operation, device).path == Path::hopper && hopper::takes_parts(operation) && operation.s.R > 0;
  if (!splits || !takes_parts) {
    AB_RETURN_IF_ERROR(arriving.await_all(stream));
    return compute(operation);
  }
  // The first sources are consecutive modulo P: either they or the others are an interval.
  const bool is_interval = arriving.first_source() >= 0;
  const int64_t ranks = arriving.ranks();
  const Sources sources{is_interval ? arriving.first_source() : arriving.end_source(),
                        is_interval ? arriving.end_source() : arriving.first_source() + ranks,
                        arriving.tokens_per_source() * operation.s.K, !is_interval};
  const Groups groups = groups_of(operation.group_sizes, operation.s.E, operation.s.R);
  AB_RETURN_IF_ERROR(find_source_bounds(groups, operation.map, sources, bounds, stream));
  Operation part = operation;
  part.part = {bounds, is_interval};
  part.skips_rest = true;
  AB_RETURN_IF_ERROR(arriving.await_first(stream));
  AB_RETURN_IF_ERROR(compute(part));
  part.part.inside = !is_interval;
  part.skips_rest = operation.skips_rest;
  AB_RETURN_IF_ERROR(arriving.await_others(stream));
  return compute(part);
}

}  // namespace anabranch::cuda
