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

// The names of the arguments of a call, for messages.
struct ReturnNames {
  const char* sums;
  const char* exchange;
  const char* buffer;
};

// Describes sums [P T, D].
ab_status describe_returning(const ReturnNames& names, const ab_exchange* exchange, int32_t buffer,
                             const ab_tensor& sums, ReturningSums* returning);

// The pushes of the chunks of sums, in order. Copy engines push sums that have been computed, by push(); or a kernel
// that computes sums stores them where they belong, between begin_direct() and end_direct(). If the call fails in
// between, the destructor makes the stream wait for the pushes so far, which still read the sums.
class Return {
 public:
  Return(const ReturningSums* sums, cudaStream_t stream) : sums_(sums), stream_(stream) {}
  Return(const Return&) = delete;
  Return& operator=(const Return&) = delete;
  ~Return();

  // Pushes `columns` columns from column `first` on. Pushes overlap with what is enqueued on the stream later.
  ab_status push(int64_t first, int64_t columns);

  // From here on kernels of the stream may store sums at place().
  ab_status begin_direct() { return begin(); }
  // Where the sums [T, columns] for a rank belong.
  void* place(int rank, int64_t first, int64_t columns) const;
  // The chunk that begins at column `first` has been stored by kernels of the stream.
  ab_status end_direct(int64_t first);

  // After the last chunk.
  ab_status end();

 private:
  ab_status begin();

  const ReturningSums* sums_;
  cudaStream_t stream_;
  bool has_begun_ = false;
};

// out = factor times the sums of all ranks, plus addend. Waits for each chunk of the peers before it reads it, and
// releases the buffer.
ab_status sum_returned(const ReturningSums& returning, float factor, const ab_tensor* addend, const ab_tensor& out,
                       cudaStream_t stream);

}  // namespace anabranch::cuda
