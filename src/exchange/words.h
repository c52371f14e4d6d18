// The 64-bit words of the exchange protocol. Each says everything that its reader needs in one atomic access. Compiled
// for host and device.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace anabranch::exchange {

using Word = uint64_t;

// A small call moves its blocks by one kernel instead of copy engines, and its slices arrive as separate phases. Ranks
// that disagree on this make different calls.
enum class Operation : uint32_t { none, all_gather, all_to_all, small_all_gather, small_all_to_all, returned_sums };

// A use of a buffer. All ranks compute the same word for the same use, so that a flag is compared with one expected
// value, and ranks that make different calls notice it.
//
//   bits 40-63  number of the use, modulo 2^24, never 0. Ranks are at most one use apart.
//   bits 36-39  operation
//   bits 0-35   bytes of a block
constexpr int kBytesBits = 36;
constexpr int kNumberShift = 40;
constexpr int64_t kMaxBlockBytes = (int64_t{1} << kBytesBits) - 1;

AB_INLINE uint32_t next_number(uint32_t number) { return number == 0xffffffu ? 1 : number + 1; }

AB_INLINE Word make_use(uint32_t number, Operation operation, int64_t bytes) {
  return static_cast<Word>(number) << kNumberShift | static_cast<Word>(operation) << kBytesBits |
         static_cast<Word>(bytes);
}
AB_INLINE uint32_t number_of(Word use) { return static_cast<uint32_t>(use >> kNumberShift); }
AB_INLINE Operation operation_of(Word use) { return static_cast<Operation>(use >> kBytesBits & 0xfu); }
AB_INLINE int64_t block_bytes_of(Word use) { return static_cast<int64_t>(use & static_cast<Word>(kMaxBlockBytes)); }

// The use before the first one. It is not 0, the initial value of flags: a rank releases it when it connects.
constexpr Word kNoUse = Word{1} << kNumberShift;

// Why an exchange is broken; 0: it is not.
//
//   bits 56-63  kind            bits 40-47  rank that noticed       bits 24-31  buffer
//   bits 48-55  rank at fault   bits 32-39  phase                   bits 0-23   number of the use
enum class FailureKind : uint32_t {
  none,
  not_released,  // the rank did not release the previous use of its buffer in time
  not_arrived,   // the rank did not send its block in time
  other_call,    // the rank made another call
  unreleased     // the rank used its own buffer again without a release
};

struct Failure {
  FailureKind kind;
  uint32_t rank;
  uint32_t noticed_by;
  uint32_t phase;
  uint32_t buffer;
  uint32_t number;
};

AB_INLINE Word pack(const Failure& failure) {
  return static_cast<Word>(failure.kind) << 56 | static_cast<Word>(failure.rank) << 48 |
         static_cast<Word>(failure.noticed_by) << 40 | static_cast<Word>(failure.phase) << 32 |
         static_cast<Word>(failure.buffer) << 24 | (failure.number & 0xffffffu);
}
AB_INLINE Failure unpack(Word word) {
  return {static_cast<FailureKind>(word >> 56),      static_cast<uint32_t>(word >> 48 & 0xffu),
          static_cast<uint32_t>(word >> 40 & 0xffu), static_cast<uint32_t>(word >> 32 & 0xffu),
          static_cast<uint32_t>(word >> 24 & 0xffu), static_cast<uint32_t>(word & 0xffffffu)};
}

}  // namespace anabranch::exchange
