// The protocol by which ranks write to each other's buffers: which flags exist, who writes them, and who waits for
// what. The kernels and the tests on the CPU compile the same code, with different memory operations.
//
// A use of a buffer, on every rank:
//
//   begin     wait until every peer has released the previous use of its buffer; compute the word of this use
//   push      copy the block of each peer to the peer's buffer, then the word of this use to the peer's `arrived`
//   await     wait until `arrived` of every peer is the word of this use; then read the buffer
//   check     after reading: if `failure` is set, discard what was read
//   release   write the word of this use to `released` of every peer
//
// No data is read before it arrived: its reader has seen the flag that was written after the data. No data is
// overwritten before it was read: a peer's next push follows its begin, which has seen `released`, which was written
// after the last read. Number, operation and size of a use are parts of its word, so both hold for equal calls only.
//
// No deadlock: number the steps of all uses by (use, step). A wait is for an earlier step of another rank, so the rank
// whose next step is the earliest is never blocked. This holds even if a device runs the steps of all streams one by
// one, as long as all ranks make the calls on all exchanges in one order. begin, await and release take one block;
// pushes take none, so no kernel that fills the device can block them.
//
// A small call makes all steps of a use in one kernel. Thread block i moves slice i of the block of every rank: it
// waits for the releases of the peers, pushes its slice as phase i, waits for phase i of the peers and reads it. The
// last thread block to finish makes the use the current one and releases it.
//
// No deadlock: thread blocks are numbered in the order in which they start. Thread block i waits for earlier uses, and
// for the push of thread block i of the peers, which does not wait for this use. Let i be the lowest number of a thread
// block, on any rank, that has not finished. Wherever thread block i has not started, all lower ones have finished and
// no higher one has started, so this kernel occupies nothing there. So a device needs room for one thread block, not
// for the whole grid. If another kernel fills the device, the call waits until that kernel ends, as begin does.
//
// A rank whose wait fails goes on, since its copies may be part of a graph, and pushes without permission. Before that
// it has set `failure` of all ranks. A reader checks `failure` after it has read, so it notices in time.
#pragma once

#include "exchange/words.h"

#if defined(__CUDACC__)
#define AB_EXCHANGE_INLINE __device__ __forceinline__
#else
#define AB_EXCHANGE_INLINE inline
#endif

namespace anabranch::exchange {

constexpr int kMaxRanks = 16;
constexpr int kBuffers = 4;
constexpr int kPhases = 16;  // parts of a use that arrive one by one
// Numbers wrap around. So a phase that some uses push and others do not must be pushed at least once in 2^24 uses, or
// its flag must be cleared by forget_arrival().

// The flags of a rank, in its memory. p: a rank.
struct Flags {
  Word use[kBuffers];                  // the current use of each buffer; written by this rank
  Word released[kBuffers][kMaxRanks];  // [b][p]: the last use of buffer b of p that p has released; written by p
  Word arrived[kBuffers][kPhases][kMaxRanks];  // [b][i][p]: the last use whose phase i from p is complete; written by p
  Word failure;                                // a packed Failure; written by any rank
  Word reported;                               // 1: the failure is in the report; written by this rank
  Word left[kMaxRanks];                        // [p]: 1 after p has made its last access; written by p
  Word scratch[2];                             // for the first copy
  uint32_t finished_blocks[kBuffers];          // blocks of the kernel that reads a buffer; 0 between kernels
  uint32_t started_blocks[kBuffers];           // blocks of a small call; 0 between kernels
};

// The first failure that a rank notices, in host memory. `seen` and `expected` are flags, or 0.
struct Report {
  Word failure;
  Word seen;
  Word expected;
};

struct Group {
  Flags* flags[kMaxRanks];  // of all ranks, as this rank accesses them
  Report* report;
  uint64_t limit;  // nanoseconds that a wait may take
  int32_t rank;
  int32_t ranks;
};

// Memory has the static functions
//   Word load(const Word*)       acquire, visible between devices
//   void store(Word*, Word)      release, visible between devices
//   bool claim(Word*)            changes 0 to 1 atomically; whether it did
//   void fence()                 orders earlier reads before later ones
//   uint64_t now(), void pause() nanoseconds; called between attempts of a wait
template <class Memory>
class Protocol {
 public:
  AB_EXCHANGE_INLINE explicit Protocol(const Group& group) : group_(group) {}

  // Waits until `peer` has released the previous use of its buffer. For this rank itself, checks that it has done so.
  // Returns whether it has.
  AB_EXCHANGE_INLINE bool await_release(int buffer, int peer) const {
    const Word previous = Memory::load(&own().use[buffer]);
    const Word* const flag = &own().released[buffer][peer];
    if (peer != group_.rank) return await(flag, previous, FailureKind::not_released, buffer, 0, peer);
    if (Memory::load(flag) == previous) return true;
    const Word failure = Memory::load(&own().failure);  // a broken exchange releases nothing
    fail(failure != 0 ? failure : failure_of(FailureKind::unreleased, buffer, 0, peer, previous), 0, 0);
    return false;
  }

  // The word of the use after the current one.
  AB_EXCHANGE_INLINE Word next_use(int buffer, Operation operation, int64_t bytes) const {
    return make_use(next_number(number_of(Memory::load(&own().use[buffer]))), operation, bytes);
  }

  // Makes the next use the current one, after await_release() for all ranks. A small call does so when all of its
  // blocks have finished, since they compute the word from the previous one.
  AB_EXCHANGE_INLINE void begin(int buffer, Word use) const { Memory::store(&own().use[buffer], use); }

  // Tells `peer` that a phase of a use has been pushed completely.
  AB_EXCHANGE_INLINE void signal(int buffer, int phase, int peer, Word use) const {
    Memory::store(&group_.flags[peer]->arrived[buffer][phase][group_.rank], use);
  }

  // signal() for the current use.
  AB_EXCHANGE_INLINE void signal(int buffer, int phase, int peer) const {
    signal(buffer, phase, peer, Memory::load(&own().use[buffer]));
  }

  // Waits until a phase of a use has arrived from `peer`. Returns whether it has.
  AB_EXCHANGE_INLINE bool await_arrival(int buffer, int phase, int peer, Word use) const {
    if (peer == group_.rank) return true;
    return await(&own().arrived[buffer][phase][peer], use, FailureKind::not_arrived, buffer, phase, peer);
  }

  // await_arrival() for the current use.
  AB_EXCHANGE_INLINE bool await_arrival(int buffer, int phase, int peer) const {
    return await_arrival(buffer, phase, peer, Memory::load(&own().use[buffer]));
  }

  // Clears the flag of a phase after its await_arrival(), before the release. Until then `peer` does not write to it.
  AB_EXCHANGE_INLINE void forget_arrival(int buffer, int phase, int peer) const {
    own().arrived[buffer][phase][peer] = 0;
  }

  // After reading a buffer: whether what was read is valid.
  AB_EXCHANGE_INLINE bool read_valid_data() const {
    Memory::fence();
    return Memory::load(&own().failure) == 0;
  }

  // Whether this rank has not released the current use. To abandon it, the rank first waits for phase 0 of all peers,
  // since a peer can begin this use only while the release of the previous one stands.
  AB_EXCHANGE_INLINE bool holds(int buffer) const {
    return Memory::load(&own().released[buffer][group_.rank]) != Memory::load(&own().use[buffer]);
  }

  // Tells `peer`, which may be this rank, that a use has ended.
  AB_EXCHANGE_INLINE void release(int buffer, int peer, Word use) const {
    if (const Word failure = Memory::load(&own().failure); failure != 0) {
      fail(failure, 0, 0);
    } else {
      Memory::store(&group_.flags[peer]->released[buffer][group_.rank], use);
    }
  }

  // release() for the current use.
  AB_EXCHANGE_INLINE void release(int buffer, int peer) const {
    release(buffer, peer, Memory::load(&own().use[buffer]));
  }

 private:
  AB_EXCHANGE_INLINE Flags& own() const { return *group_.flags[group_.rank]; }

  AB_EXCHANGE_INLINE Word failure_of(FailureKind kind, int buffer, int phase, int peer, Word use) const {
    return pack({kind, static_cast<uint32_t>(peer), static_cast<uint32_t>(group_.rank), static_cast<uint32_t>(phase),
                 static_cast<uint32_t>(buffer), number_of(use)});
  }

  AB_EXCHANGE_INLINE bool await(const Word* flag, Word expected, FailureKind kind, int buffer, int phase,
                                int peer) const {
    const uint64_t start = Memory::now();
    for (;;) {
      const Word seen = Memory::load(flag);
      if (seen == expected) return true;
      Word failure = Memory::load(&own().failure);
      if (failure == 0 && number_of(seen) == number_of(expected)) {
        failure = failure_of(FailureKind::other_call, buffer, phase, peer, expected);
      }
      if (failure == 0 && Memory::now() - start > group_.limit) {
        failure = failure_of(kind, buffer, phase, peer, expected);
      }
      if (failure != 0) {
        fail(failure, seen, expected);
        return false;
      }
      Memory::pause();
    }
  }

  // Every rank that notices a failure sets it everywhere, before it can push without permission.
  AB_EXCHANGE_INLINE void fail(Word failure, Word seen, Word expected) const {
    for (int r = 0; r < group_.ranks; ++r) Memory::store(&group_.flags[r]->failure, failure);
    if (!Memory::claim(&own().reported)) return;
    const bool noticed_here = unpack(failure).noticed_by == static_cast<uint32_t>(group_.rank);
    Memory::store(&group_.report->seen, noticed_here ? seen : 0);
    Memory::store(&group_.report->expected, noticed_here ? expected : 0);
    Memory::store(&group_.report->failure, failure);
  }

  const Group& group_;
};

}  // namespace anabranch::exchange
