#include "experts/cuda/convert.h"

#include <algorithm>

#include "core/cuda/launch.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;  // per SM

__global__ void __launch_bounds__(kThreads) convert_elements(const Floats from, const Floats to, const int64_t count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    to.set(i, from[i]);
  }
}

}  // namespace

ab_status convert(const Floats& from, const Floats& to, int64_t count, int multiprocessors, cudaStream_t stream) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, int64_t{kBlocks} * multiprocessors);
  return launch("conversion", convert_elements, {blocks, kThreads, 0, stream, true}, from, to, count);
}

}  // namespace anabranch::cuda
