// Checks of the arguments of exchanges. They need no device.
#pragma once

#include <cstdint>

#include "anabranch/exchange.h"
#include "exchange/protocol.h"

namespace anabranch::exchange {

static_assert(kMaxRanks == AB_EXCHANGE_MAX_RANKS && kBuffers == AB_EXCHANGE_BUFFERS, "the header states the limits");

// What the ranks of a group agree on, and the place of one of them.
struct Shape {
  int32_t rank = 0;
  int32_t ranks = 1;
  int64_t buffer_bytes[kBuffers] = {};
};

constexpr double kDefaultTimeout = 600;

// Checks the rank, the sizes and the time limit. `variable` is the value of ANABRANCH_EXCHANGE_TIMEOUT, or nullptr.
ab_status check_create(const ab_exchange_create_args* args, const char* variable, Shape* shape, uint64_t* limit);

// Blocks of at most this size are moved by one kernel instead of copy engines if the call has an output, is made as a
// whole and is not in lockstep. For larger blocks the copy engines are faster and take no SMs. Several tensors are
// moved by one kernel, whatever their sizes: they are the routing of tokens, whose pushes keep the copy engines busy.
constexpr int64_t kSmallBytes = 512 << 10;

constexpr int kMoreTensors = 2;

// A further tensor of an all_gather.
struct MoreBlocks {
  const char* x = nullptr;
  char* out = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;  // of its blocks in the buffer
};

// A checked call: this rank sends `bytes` bytes to every rank, from x + d * stride to rank d.
struct Call {
  Operation operation = Operation::none;
  int32_t buffer = 0;
  bool lockstep = false;
  int32_t part = AB_EXCHANGE_WHOLE;
  int64_t bytes = 0;
  int64_t stride = 0;
  const char* x = nullptr;
  char* out = nullptr;  // of ranks * bytes bytes
  bool stays_in_buffer = false;
  MoreBlocks more[kMoreTensors];
  int num_more = 0;

  bool is_small() const { return operation == Operation::small_all_gather || operation == Operation::small_all_to_all; }
};

constexpr bool is_buffer(int32_t buffer) { return buffer >= 0 && buffer < kBuffers; }
ab_status check_buffer(int32_t buffer, const char* name = "buffer");

// Requires blocks of at most kMaxBlockBytes bytes. The name is that of their tensor.
ab_status check_block_bytes(const char* name, int64_t bytes);

ab_status check_all_gather(const ab_exchange_all_gather_args* args, const Shape& shape, Call* call);
ab_status check_sum(const ab_exchange_sum_args* args, const Shape& shape);
ab_status check_all_to_all(const ab_exchange_all_to_all_args* args, const Shape& shape, Call* call);

// The status of an exchange with this failure; `limit` is that of its waits.
ab_status status_of(const Report& report, uint64_t limit);

}  // namespace anabranch::exchange
