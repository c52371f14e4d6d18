// A barrier in shared memory (mbarrier), at which threads, TMA and asynchronous copies arrive.
//
// A barrier goes through phases 0, 1, 2, ... A phase completes when the expected arrivals and the expected bytes have
// arrived. wait(n % 2) returns when phase n has completed. wait(1) on a new barrier waits for the phase before the
// first and returns at once, so a stage that is initially empty needs no special case.
#pragma once

#include <cstdint>

#include "core/cuda/tile_memory.cuh"

namespace anabranch::cuda {

// Seconds after which a wait traps, so that a deadlock becomes an error that compute-sanitizer can locate; 0: never.
#ifndef ANABRANCH_CUDA_WAIT_LIMIT
#define ANABRANCH_CUDA_WAIT_LIMIT 0
#endif

class Barrier {
 public:
  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address()), "r"(arrivals) : "memory");
  }

  __device__ void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(address()) : "memory"); }

  // Arrives at the corresponding barrier in the shared memory of another block of the cluster. The release has block
  // scope on purpose (PTX's default, .release.cta): the consumer has only read the stage. A release at cluster scope
  // would also wait for its global stores.
  __device__ void arrive_in_block(uint32_t block) {
    asm volatile(
        "{\n"
        ".reg .u32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n"
        :
        : "r"(address()), "r"(block)
        : "memory");
  }

  // Arrives, and adds `bytes` to the bytes that the phase expects from TMA.
  __device__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(address()), "r"(bytes) : "memory");
  }

  // Arrives when the asynchronous copies that this thread has issued are complete.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(address()) : "memory");
  }

  // The loop is in PTX: a loop in C++ made the compiler spill accumulators. try_wait suspends the thread for a while;
  // test_wait does not, so the number of attempts measures time.
  __device__ void wait(uint32_t parity) const {
#if ANABRANCH_CUDA_WAIT_LIMIT > 0
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        ".reg .pred more;\n"
        ".reg .u32 attempt;\n"
        "mov.u32 attempt, 0;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@ended bra done;\n"
        "add.u32 attempt, attempt, 1;\n"
        "setp.ne.u32 more, attempt, %2;\n"
        "@more bra again;\n"
        "trap;\n"
        "done:\n"
        "}\n"
        :
        : "r"(address()), "r"(parity), "n"(ANABRANCH_CUDA_WAIT_LIMIT << 26)  // 2^26 attempts take about one second
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n"
        "}\n"
        :
        : "r"(address()), "r"(parity)
        : "memory");
#endif
  }

  __device__ uint32_t address() const { return shared_address(this); }

 private:
  uint64_t state_;
};

// Call after a thread's init() of barriers and before the other threads of the block and TMA use them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy();
}

// A position in a ring of kStages stages with one barrier each: the stage and the phase parity of its barrier.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  // Returns the position of the n-th use of the ring.
  static __device__ RingPosition nth(int n) {
    const auto use = static_cast<uint32_t>(n);  // unsigned division and remainder take fewer instructions
    return {static_cast<int>(use % kStages), use / kStages & 1u};
  }

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1u;
    }
  }
};

}  // namespace anabranch::cuda
