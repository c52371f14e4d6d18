#include "emulator.h"

#include <ucontext.h>
#include <csetjmp>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace emulation {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
  uint32_t padded_bytes;
};

struct Barrier {
  int arrived = 0;
  int64_t phase = 0;
};

// A fiber. It starts from a ucontext and then switches by _longjmp, which avoids the signal-mask system call of
// swapcontext. After a kernel it waits for that of the next block.
struct Thread {
  jmp_buf resume_point;
  bool started = false;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  bool finished = false;
  const Barrier* barrier = nullptr;  // the barrier it waits at; nullptr: runnable
  int64_t waits_for = 0;             // the phase of the barrier that must complete
  int64_t publications = 0;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Warp {
  Barrier barrier;
  int running = 0;  // threads that have not finished
  char published[2][kLanes][64];
  char results[2][kLanes][64];
  bool computed[2];
};

struct Block {
  int running = 0;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  std::vector<char> memory;
  size_t shared_bytes = 0;
};

Options options;
std::vector<std::unique_ptr<Thread>> fibers;  // those of the largest block so far
Block block;
jmp_buf scheduler;
int current = 0;
const std::function<void()>* body = nullptr;

Thread& self() { return *fibers[static_cast<size_t>(current)]; }
Warp& warp() { return block.warps[static_cast<size_t>(current / kLanes)]; }

void yield() {
  if (_setjmp(self().resume_point) == 0) _longjmp(scheduler, 1);
}

void run_thread() {
  for (;;) {
    (*body)();
    if (!self().open.empty()) fail("a thread finished without waiting for its copies");
    self().finished = true;
    --warp().running;
    --block.running;
    yield();
  }
}

void resume() {
  if (_setjmp(scheduler) != 0) return;
  Thread& thread = self();
  if (thread.started) _longjmp(thread.resume_point, 1);
  thread.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, run_thread, 0);
  setcontext(&context);
}

// Completes the barrier's phase if all `running` threads have arrived.
bool release(Barrier& barrier, int running) {
  if (barrier.arrived == 0 || barrier.arrived < running) return false;
  barrier.arrived = 0;
  ++barrier.phase;
  return true;
}

// Waits at a barrier. The phase completes when `expected` threads have arrived; 0: when the scheduler calls release().
void wait(Barrier& barrier, int expected = 0) {
  Thread& thread = self();
  thread.barrier = &barrier;
  thread.waits_for = barrier.phase;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  yield();
  thread.barrier = nullptr;
}

bool can_run(int index) {
  const Thread& thread = *fibers[static_cast<size_t>(index)];
  if (thread.finished) return false;
  return thread.barrier == nullptr || thread.barrier->phase > thread.waits_for;
}

void copy_now(const Copy& copy) {
  if (copy.to % copy.padded_bytes != 0)
    fail("a copy of %u bytes to the unaligned address %u", copy.padded_bytes, copy.to);
  if (copy.to + copy.padded_bytes > block.shared_bytes)
    fail("a copy past the block's shared memory, to address %u", copy.to);
  if (copy.bytes > copy.padded_bytes) fail("a copy of %u bytes into %u bytes", copy.bytes, copy.padded_bytes);
  if (copy.bytes > 0) {
    if (reinterpret_cast<uintptr_t>(copy.from) % copy.padded_bytes != 0)
      fail("a copy of %u bytes from the unaligned address %p", copy.padded_bytes, copy.from);
    std::memcpy(block.memory.data() + copy.to, copy.from, copy.bytes);
  }
  std::memset(block.memory.data() + copy.to + copy.bytes, 0, copy.padded_bytes - copy.bytes);
}

void run_block() {
  std::vector<int> order(block_size.x);
  std::iota(order.begin(), order.end(), 0);
  const bool by_warp = options.order == Order::warps_forward || options.order == Order::warps_backward;
  if (options.order == Order::backward || options.order == Order::warps_backward) {
    std::reverse(order.begin(), order.end());
  }
  std::mt19937 random(block_index.x);
  const auto run = [](std::span<const int> threads) {
    bool progress = false;
    for (const int index : threads) {
      if (!can_run(index)) continue;
      current = index;
      thread_index = {static_cast<unsigned>(index), 0, 0};
      progress = true;
      resume();
      release(warp().barrier, warp().running);
    }
    return progress;
  };
  for (;;) {
    if (options.order == Order::shuffled) std::shuffle(order.begin(), order.end(), random);
    bool progress = false;
    if (by_warp) {
      const std::span<const int> all(order);
      for (size_t first = 0; first < all.size(); first += kLanes) {
        while (run(all.subspan(first, std::min<size_t>(kLanes, all.size() - first)))) progress = true;
      }
    } else {
      progress = run(order);
    }
    if (release(block.barrier, block.running)) progress = true;
    if (block.running == 0) return;
    if (!progress) fail("deadlock: all threads wait");
  }
}

}  // namespace

void set_options(Options new_options) { options = new_options; }

Dim3 thread_index;
Dim3 block_index;
Dim3 block_size;
Dim3 grid_size;
char* shared_memory() { return block.memory.data(); }
size_t shared_bytes() { return block.shared_bytes; }

void run_grid(int64_t blocks, int threads, size_t bytes, const std::function<void()>& kernel) {
  body = &kernel;
  grid_size = {static_cast<unsigned>(blocks), 1, 1};
  block_size = {static_cast<unsigned>(threads), 1, 1};
  while (fibers.size() < block_size.x) fibers.push_back(std::make_unique<Thread>());
  for (int64_t b = 0; b < blocks; ++b) {
    block_index = {static_cast<unsigned>(b), 0, 0};
    block.running = threads;
    block.warps.assign(static_cast<size_t>((threads + kLanes - 1) / kLanes), Warp{});
    block.barrier = {};
    std::fill(std::begin(block.named), std::end(block.named), Barrier{});
    block.shared_bytes = bytes;
    block.memory.assign(bytes, static_cast<char>(0xff));  // NaN
    for (int i = 0; i < threads; ++i) {
      Thread& thread = *fibers[static_cast<size_t>(i)];
      thread.finished = false;
      thread.barrier = nullptr;
      thread.publications = 0;
      thread.groups.clear();
      thread.open.clear();
      ++block.warps[static_cast<size_t>(i / kLanes)].running;
    }
    run_block();
  }
}

void sync_block() { wait(block.barrier); }

void sync_threads(int barrier, int threads) { wait(block.named[barrier], threads); }

const char (*publish(const void* value, size_t bytes))[64] {
  if (bytes > 64) fail("a lane publishes %zu bytes, expected at most 64", bytes);
  const int64_t turn = self().publications++ % 2;
  auto& published = warp().published[turn];
  std::memcpy(published[current % kLanes], value, bytes);
  warp().computed[turn] = false;
  wait(warp().barrier);
  return published;
}

const char* compute_in_warp(const void* value, size_t bytes, WarpFunction* function) {
  const int64_t turn = self().publications % 2;
  const auto* const published = publish(value, bytes);
  auto& results = warp().results[turn];
  if (!std::exchange(warp().computed[turn], true)) function(published, results);
  return results[current % kLanes];
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t padded_bytes) {
  const Copy copy{to, from, bytes, padded_bytes};
  if (options.copies == Copies::early) copy_now(copy);
  self().open.push_back(copy);
}

void end_group() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void wait_for_groups(int pending) {
  auto& groups = self().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    if (options.copies == Copies::late) {
      for (const Copy& copy : groups.front()) copy_now(copy);
    }
    groups.pop_front();
  }
}

void fail(const char* format, ...) {
  std::fprintf(stderr, "emulation: block %u, thread %d: ", block_index.x, current);
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  std::abort();
}

Runtime runtime;

namespace {

std::mutex limits_mutex;
std::map<std::pair<int, const void*>, int> limits;  // by device and kernel

}  // namespace

void set_limit(const void* kernel, int bytes) {
  std::lock_guard lock(limits_mutex);
  limits[{runtime.device, kernel}] = bytes;
}

int limit_of(const void* kernel) {
  std::lock_guard lock(limits_mutex);
  const auto found = limits.find({runtime.device, kernel});
  return found == limits.end() ? 0 : found->second;
}

void forget_limits() {
  std::lock_guard lock(limits_mutex);
  std::erase_if(limits, [](const auto& limit) { return limit.first.first == runtime.device; });
}

}  // namespace emulation
