// The state of an exchange on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "exchange/check.h"
#include "exchange/cuda/arena.h"
#include "exchange/handle.h"
#include "exchange/protocol.h"

// Nothing here but `calls` changes after connect: what changes from call to call is in device memory.
struct ab_exchange {
  anabranch::exchange::Shape shape;
  anabranch::exchange::Handle handle{};  // of this rank
  anabranch::cuda::Arena arena;
  anabranch::exchange::Group group{};

  bool connected = false;
  anabranch::exchange::Handle handles[anabranch::exchange::kMaxRanks]{};  // of all ranks, as are the next two
  char* buffers[anabranch::exchange::kMaxRanks]{};
  bool opened[anabranch::exchange::kMaxRanks]{};  // by cudaIpc

  std::mutex calls;  // held while a call enqueues copies or begins, ends or releases a use
};

namespace anabranch::cuda {

// The beginning of a buffer in the memory of a rank.
char* buffer_of(const ab_exchange& exchange, int rank, int buffer);

// The bytes of all buffers of a rank.
int64_t bytes_of_buffers(const exchange::Shape& shape);

// AB_INTERNAL if the exchange is broken.
ab_status check_failure(const ab_exchange& exchange);

// Whether calls can be made on an exchange, which may be NULL or broken, on the current device. The name is that of the
// argument.
ab_status check_callable(const ab_exchange* exchange, const char* name = "exchange");

// check_callable and check_failure.
ab_status check_usable(const ab_exchange* exchange, const char* name = "exchange");

}  // namespace anabranch::cuda
