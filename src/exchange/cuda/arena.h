// The memory of one rank that its peers write to, and how long it lives.
//
// Peers may write to it until they have destroyed their own exchanges. So destroy() only retires an arena, and
// free_unused_arenas() frees it later, without waiting for anyone: when no exchange of this process that has opened it
// is alive, and all peers in other processes have set Flags::left.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/cuda/failure.h"
#include "core/status.h"
#include "exchange/protocol.h"

namespace anabranch::cuda {

struct Arena {
  uint64_t id = 0;  // unique in this process
  int device = 0;
  exchange::Flags* flags = nullptr;    // an allocation of its own
  char* buffers = nullptr;             // one allocation
  exchange::Report* report = nullptr;  // host memory that the device can write to
  cudaStream_t side = nullptr;         // carries the pushes
  cudaStream_t local = nullptr;        // carries copies of this rank's own blocks
  cudaEvent_t fork = nullptr;
  // By buffer: the pushes and the local copies of its last call have ended.
  cudaEvent_t pushed[exchange::kBuffers] = {};
  cudaEvent_t copied[exchange::kBuffers] = {};
};

// The peers of a connected exchange.
struct Peers {
  uint64_t local[exchange::kMaxRanks] = {};  // [r]: the id of a peer in this process, else 0
  bool foreign[exchange::kMaxRanks] = {};    // [r]: whether the peer is in another process
};

// Allocates everything on the current device, clears the flags, and adds the arena to those of the process.
ab_status create_arena(int device, int64_t bytes, int rank, Arena* arena);

// Held while arenas of this process are connected, retired or freed.
std::mutex& arena_mutex();

// The following functions require arena_mutex(). They may wait for devices.
bool is_live(uint64_t id);                        // it exists and is not retired
void set_peers(uint64_t id, const Peers& peers);  // from now on the exchange may access the memory of its peers
void retire(uint64_t id);
void free_unused_arenas();

// Runs f() on a thread whose current device is `device`. The calling thread keeps its current device; to restore it
// could create a context on a device that the process does not use.
template <class F>
ab_status on_device(int device, const F& f) {
  ab_status status = ok();
  try {
    std::thread([&] {
      const cudaError_t failure = cudaSetDevice(device);
      status = failure == cudaSuccess ? f() : failed("exchange: cudaSetDevice", failure);
    }).join();
  } catch (const std::system_error&) {
    return error(AB_OUT_OF_MEMORY, "exchange: no thread could be started");
  }
  return status;
}

// Returns the status of a failed runtime call.
#define AB_RETURN_IF_CUDA_ERROR(name, expression)                                                     \
  do {                                                                                                \
    const cudaError_t ab_failure_ = (expression);                                                     \
    if (ab_failure_ != cudaSuccess) return ::anabranch::cuda::failed("exchange: " name, ab_failure_); \
  } while (false)

}  // namespace anabranch::cuda
