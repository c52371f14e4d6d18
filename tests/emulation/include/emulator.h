// A GPU for tests where there is none: runs kernels on the CPU, a block at a time, every thread as a fiber that gives
// way where it waits for others.
//
// It has no sense of time, so what it finds it finds by doing things in the least convenient order: the order in which
// threads run, and when asynchronous copies take place, are options of a run. Only what all threads wait for is
// ordered.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace emulation {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// How the threads of a block take turns: by number, the other way round, or shuffled anew at every turn.
enum class Order { forward, backward, shuffled };
// When a copy takes place: as soon as it is started, or only when somebody waits for it.
enum class Copies { early, late };
struct Options {
  Order order = Order::forward;
  Copies copies = Copies::late;
};
// Of all launches from now on.
void set_options(Options options);

// Of the thread that runs.
extern Dim3 thread_index;
extern Dim3 block_index;
extern Dim3 block_size;
extern Dim3 grid_size;
char* shared_memory();  // of its block, which asked for it
size_t shared_bytes();

void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

void sync_block();
// Waits until `threads` threads of the block have called it with the same barrier, which is 0 to 15.
void sync_threads(int barrier, int threads);
// Shows `bytes` to the other lanes of the warp, which all call it, and returns what lane i shows: [32] of 64 bytes,
// until the lane's next call but one.
const char (*show(const void* value, size_t bytes))[64];

template <class T>
T of_lane(const T& value, int lane) {
  T result;
  std::memcpy(&result, show(&value, sizeof(T))[lane & 31], sizeof(T));
  return result;
}

// A copy of `bytes` and zeros up to `room`; in the group that is open.
void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t room);
void end_group();
void wait_for_groups(int pending);

[[noreturn]] void fail(const char* format, ...);

}  // namespace emulation
