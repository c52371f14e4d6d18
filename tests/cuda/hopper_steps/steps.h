// Checks of the Hopper kernels, ordered from the smallest part up. The first step that fails shows where to look.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "anabranch/types.h"
#include "core/dtype.h"

namespace anabranch::steps {

// A step prints what it checks and returns the number of checks that failed.
struct Step {
  const char* name;
  int (*run)();
};

int tensor_maps();         // tensor_map.h: the driver accepts the tensor maps
int wgmma_panels();        // descriptors, majors, widths
int loads_of_boxes();      // TMA to shared memory, swizzle, windows, zeros outside
int stores_of_subtiles();  // accumulators to memory, windows
int gathered_rows();       // cp.async to shared memory, indices out of range
int tiles_of_groups();     // every tile appears once
int sequences_of_gemms();  // many tiles per CTA, back-to-back launches, K shorter and longer than the pipeline

#define STEP_CUDA(expression)                                                                              \
  do {                                                                                                     \
    const cudaError_t step_failure = expression;                                                           \
    if (step_failure != cudaSuccess) {                                                                     \
      std::printf("  %s:%d: %s: %s\n", __FILE__, __LINE__, #expression, cudaGetErrorString(step_failure)); \
      std::fflush(stdout);                                                                                 \
      std::_Exit(1);                                                                                       \
    }                                                                                                      \
  } while (false)

inline int multiprocessors() {
  int count = 0;
  STEP_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// Prints a status that is an error. Returns 1 for an error, else 0.
inline int fails(const ab_status& status) {
  if (status.code != AB_OK) std::printf("  status %d: %s\n", status.code, status.message);
  return status.code == AB_OK ? 0 : 1;
}

// A device array between two guard zones. All bytes are 0xff (NaN, -1) at first.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(T)) {
    STEP_CUDA(cudaMalloc(&memory_, bytes_ + 2 * kGuard));
    STEP_CUDA(cudaMemset(memory_, 0xff, bytes_ + 2 * kGuard));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    STEP_CUDA(cudaMemcpy(data(), values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(memory_ + kGuard); }
  void fill_with_nan() const { STEP_CUDA(cudaMemset(data(), 0xff, bytes_)); }

  // Both functions wait for the device and report a guard zone that was written.
  std::vector<T> fetch(int* failures) const {
    check_guards(failures);
    std::vector<T> values(bytes_ / sizeof(T));
    STEP_CUDA(cudaMemcpy(values.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return values;
  }
  void check_guards(int* failures) const {
    STEP_CUDA(cudaDeviceSynchronize());
    std::vector<unsigned char> guards(2 * kGuard);
    STEP_CUDA(cudaMemcpy(guards.data(), memory_, kGuard, cudaMemcpyDeviceToHost));
    STEP_CUDA(cudaMemcpy(guards.data() + kGuard, memory_ + kGuard + bytes_, kGuard, cudaMemcpyDeviceToHost));
    if (std::all_of(guards.begin(), guards.end(), [](unsigned char byte) { return byte == 0xff; })) return;
    std::printf("  a guard zone was written\n");
    ++*failures;
  }

 private:
  static constexpr size_t kGuard = 4096;
  char* memory_ = nullptr;
  size_t bytes_;
};

// Returns random numbers in [-1, 1) as the bits of a 16-bit type.
template <class Element>
std::vector<uint16_t> random_bits(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  for (uint16_t& value : bits) value = from_float<Element>(uniform(random)).bits;
  return bits;
}

template <class Element>
float value_of(uint16_t bits) {
  return to_float(Element{bits});
}

// Counts values that differ and prints the first 6.
class Comparison {
 public:
  explicit Comparison(const char* what) : what_(what) {}

  void check(bool right, int64_t i, int64_t j, double got, double want) {
    ++checked_;
    if (right) return;
    if (++wrong_ <= 6) {
      std::printf("    %s [%lld, %lld]: got %g, expected %g\n", what_, static_cast<long long>(i),
                  static_cast<long long>(j), got, want);
    }
  }
  void near(int64_t i, int64_t j, double got, double want, double tolerance) {
    const double error = std::abs(got - want);
    if (error > worst_) worst_ = error;
    check(error <= tolerance, i, j, got, want);
  }
  void same(int64_t i, int64_t j, int64_t got, int64_t want) {
    check(got == want, i, j, static_cast<double>(got), static_cast<double>(want));
  }

  // Returns 1 if any value was wrong.
  int report(bool always = true) const {
    if (always || wrong_ > 0) {
      std::printf("  %-4s %s: %lld of %lld wrong, largest error %.3g\n", wrong_ == 0 ? "ok" : "BAD", what_,
                  static_cast<long long>(wrong_), static_cast<long long>(checked_), worst_);
    }
    return wrong_ == 0 ? 0 : 1;
  }

 private:
  const char* what_;
  int64_t checked_ = 0;
  int64_t wrong_ = 0;
  double worst_ = 0;
};

}  // namespace anabranch::steps
