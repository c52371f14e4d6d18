// An emulated GPU for tests without one. Runs kernels on the CPU, one block at a time. Each thread is a fiber that
// yields where it waits for other threads.
//
// It does not model time. Instead, options choose the order in which threads run and when asynchronous copies take
// effect, so that a missing barrier or wait shows in the results. Only barriers and waits order the threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>

namespace emulation {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// The order in which the threads of a block run, each until it waits: ascending, descending, or shuffled anew every
// round. Or one warp after another, in ascending or descending order, each until all its threads wait for other warps.
enum class Order { forward, backward, shuffled, warps_forward, warps_backward };
// When an asynchronous copy takes effect: when it is issued, or only when a thread waits for it.
enum class Copies { early, late };
struct Options {
  Order order = Order::forward;
  Copies copies = Copies::late;
};
// Sets the options of all later launches.
void set_options(Options options);

// Built-in variables of the running thread.
extern Dim3 thread_index;
extern Dim3 block_index;
extern Dim3 block_size;
extern Dim3 grid_size;
char* shared_memory();  // dynamic shared memory of the running block
size_t shared_bytes();

void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

void sync_block();
// Waits until `threads` threads of the block have called it with the same named barrier, 0 to 15.
void sync_threads(int barrier, int threads);
// Exchanges values within a warp; all lanes call it. Returns the bytes that each lane passed, as [32][64]. The result
// is valid until the second next call of the lane.
const char (*publish(const void* value, size_t bytes))[64];

// Exchanges values like `publish`. The first lane that continues calls `function`, which computes a result for each
// lane from all lanes' values. Returns that of this lane.
using WarpFunction = void(const char (*published)[64], char (*results)[64]);
const char* compute_in_warp(const void* value, size_t bytes, WarpFunction* function);

template <class T>
T value_of_lane(const T& value, int lane) {
  T result;
  std::memcpy(&result, publish(&value, sizeof(T))[lane & 31], sizeof(T));
  return result;
}

// Adds an asynchronous copy to the open group: `bytes` bytes, then zeros up to `padded_bytes`.
void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t padded_bytes);
void end_group();
void wait_for_groups(int pending);

// The state of the runtime that tests set and read. All threads have the same current device.
struct Runtime {
  std::atomic<int> device{0};
  std::atomic<int> attribute_calls{0};  // calls that read or set an attribute of a device or of a kernel
  std::atomic<bool> attribute_calls_fail{false};
};
extern Runtime runtime;

// The limit of a kernel's dynamic shared memory on the current device; 0 if none was set.
void set_limit(const void* kernel, int bytes);
int limit_of(const void* kernel);
void forget_limits();  // of all kernels on the current device

[[noreturn]] void fail(const char* format, ...);

}  // namespace emulation
