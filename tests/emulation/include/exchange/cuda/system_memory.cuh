// Memory operations of the exchange protocol: the memory of emulated devices is shared by processes.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

#include "exchange/words.h"

namespace anabranch::cuda {

struct SystemMemory {
  static exchange::Word load(const exchange::Word* from) {
    return std::atomic_ref<exchange::Word>(*const_cast<exchange::Word*>(from)).load(std::memory_order_acquire);
  }
  static void store(exchange::Word* to, exchange::Word value) {
    std::atomic_ref<exchange::Word>(*to).store(value, std::memory_order_release);
  }
  static bool claim(exchange::Word* at) {
    exchange::Word none = 0;
    return std::atomic_ref<exchange::Word>(*at).compare_exchange_strong(none, 1);
  }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  static uint64_t now() {
    return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  static void pause() { sched_yield(); }
};

}  // namespace anabranch::cuda
