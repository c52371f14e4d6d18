// The exported description of an exchange, from which its peers open its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "anabranch/exchange.h"
#include "exchange/check.h"

namespace anabranch::exchange {

constexpr size_t kIpcBytes = 64;  // of a cudaIpcMemHandle_t

struct Handle {
  char magic[8];
  char version[24];  // of the library
  int32_t rank;
  int32_t ranks;
  int64_t buffer_bytes[kBuffers];
  uint64_t id;               // of the exchange, in its process
  uint64_t process[2];       // a random number of the process
  int64_t pid;               // for messages
  char host[64];             // for messages
  char boot[40];             // identifies the host until it restarts; empty: unknown
  unsigned char device[16];  // UUID
  char pci[16];
  int32_t number;     // of the device in its process
  int32_t ipc_error;  // not 0: the memory cannot be shared with other processes, and cudaError_t says why
  void* flags;        // for peers in the same process
  void* buffers;
  char flags_ipc[kIpcBytes];
  char buffers_ipc[kIpcBytes];
};
static_assert(sizeof(Handle) <= AB_EXCHANGE_HANDLE_BYTES, "the header states the size of a handle");
static_assert(std::is_trivially_copyable_v<Handle>, "handles are copied as bytes");

constexpr char kHandleMagic[8] = {'a', 'b', 'x', 'c', 'h', 'g', '0', '1'};

inline bool is_same_process(const Handle& a, const Handle& b) {
  return a.process[0] == b.process[0] && a.process[1] == b.process[1];
}

// Copies the handles of all ranks to `handles` and checks that `own` can be connected with them.
ab_status check_handles(const void* given, size_t bytes, const Handle& own, Handle (&handles)[kMaxRanks]);

}  // namespace anabranch::exchange
