// Memory operations of the exchange protocol that are ordered between devices.
#pragma once

#include <cstdint>

#include "exchange/words.h"

namespace anabranch::cuda {

struct SystemMemory {
  static __device__ __forceinline__ exchange::Word load(const exchange::Word* from) {
    exchange::Word value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }

  static __device__ __forceinline__ void store(exchange::Word* to, exchange::Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }

  static __device__ __forceinline__ bool claim(exchange::Word* at) {
    return atomicCAS(reinterpret_cast<unsigned long long*>(at), 0ull, 1ull) == 0;
  }

  static __device__ __forceinline__ void fence() { __threadfence_system(); }

  static __device__ __forceinline__ uint64_t now() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }

  static __device__ __forceinline__ void pause() { __nanosleep(100); }
};

}  // namespace anabranch::cuda
