// Sums [P T, D] that return to their source ranks in chunks of columns (return_columns()). A chunk is one phase. In
// memory, here and in the buffers of the peers, chunks follow one another, each as [P T, columns].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "anabranch/types.h"
#include "exchange/cuda/exchange.h"

namespace anabranch::cuda {

struct ReturningSums {
  const ab_exchange* exchange = nullptr;
  int buffer = 0;
  int64_t T = 0;
  int64_t D = 0;
  int32_t dtype = 0;
  int64_t columns = 0;  // of a chunk
  char* sums = nullptr;

  int64_t ranks() const { return exchange->shape.ranks; }
  // Offset in bytes of a chunk, which begins at column `first`, and of the block of a rank in it.
  int64_t chunk(int64_t first) const;
  int64_t block(int64_t rank, int64_t chunk_columns) const;
};

// Describes sums [P T, D]. The name is that of the argument.
ab_status describe_returning(const char* name, const ab_exchange* exchange, int32_t buffer, const ab_tensor& sums,
                             ReturningSums* returning);

// Before the first chunk is pushed.
ab_status begin_return(const ReturningSums& returning, cudaStream_t stream);

// Pushes `columns` columns from column `first` on. Pushes overlap with what is enqueued on `stream` later.
ab_status push_chunk(const ReturningSums& returning, int64_t first, int64_t columns, cudaStream_t stream);

// After the last chunk.
ab_status end_return(const ReturningSums& returning);

// out = factor times the sums of all ranks, plus addend. Waits for each chunk of the peers before it reads it, and
// releases the buffer.
ab_status sum_returned(const ReturningSums& returning, float factor, const ab_tensor* addend, const ab_tensor& out,
                       cudaStream_t stream);

}  // namespace anabranch::cuda
