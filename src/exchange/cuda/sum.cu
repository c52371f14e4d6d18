#include "exchange/cuda/sum.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "dispatch/columns.cuh"
#include "exchange/cuda/load.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;

// A thread computes a vector of N elements.
template <class Row, class Out, int N>
__global__ void __launch_bounds__(kThreads) sum_blocks(const SumOfBlocks sum) {
  const int64_t vectors = sum.arrived.D / N;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= sum.T * vectors) return;
  const int64_t t = i / vectors;
  const int64_t column = (i - t * vectors) * N;
  float sums[N] = {};
  for (int s = 0; s < sum.ranks; ++s) {
    const char* const block = s == sum.rank ? sum.own : sum.arrived[s * sum.T];
    Vector<Row, N> row;
    row.load(reinterpret_cast<const Row*>(block + t * sum.arrived.bytes) + column);
#pragma unroll
    for (int j = 0; j < N; ++j) sums[j] = __fadd_rn(sums[j], __fmul_rn(sum.factor, row[j]));
  }
  if (sum.addend.data != nullptr) {
    with_float_type(sum.addend.dtype, [&]<class Addend>(Addend) {
      constexpr int kElements = std::min<int>(N, kAccessBytes / sizeof(Addend));
      const auto* const from = reinterpret_cast<const Addend*>(sum.addend.data) + t * sum.addend.D + column;
      Vector<Addend, kElements> loaded[N / kElements];
#pragma unroll
      for (int i = 0; i < N / kElements; ++i) loaded[i].load(from + i * kElements);
#pragma unroll
      for (int j = 0; j < N; ++j) sums[j] = __fadd_rn(sums[j], loaded[j / kElements][j % kElements]);
    });
  }
  Vector<Out, N>::from(sums).store_if(true, reinterpret_cast<Out*>(sum.out.data) + t * sum.out.D + column);
}

// Calls f(kernel, elements per thread) for the types and the alignment of a sum.
template <class F>
ab_status with_kernel(const SumOfBlocks& sum, F&& f) {
  const auto visit = [&]<class Row, class Out, int N>(Row, Out, std::integral_constant<int, N>) {
    return f(sum_blocks<Row, Out, N>, N);
  };
  // Both must be aligned for accesses of several elements.
  const uintptr_t addresses = address(sum.own) | address(sum.addend.data);
  return with_row_types(sum.arrived, sum.out, visit, reinterpret_cast<const void*>(addresses));
}

}  // namespace

ab_status launch_sum(const SumOfBlocks& sum, cudaStream_t stream) {
  return with_kernel(sum, [&](auto kernel, int64_t elements) {
    const int64_t threads = sum.T * (sum.arrived.D / elements);
    return launch("exchange sum", kernel, {(threads + kThreads - 1) / kThreads, kThreads, 0, stream}, sum);
  });
}

ab_status load_sum() {
  constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};
  for (const int32_t row : kDtypes) {
    for (const int32_t out : kDtypes) {
      for (const int64_t columns : {1, 16}) {  // with a vector per access, and with an element
        SumOfBlocks sum{};
        sum.arrived.dtype = row;
        sum.out.dtype = out;
        sum.arrived.D = sum.out.D = columns;
        AB_RETURN_IF_ERROR(with_kernel(sum, [](auto kernel, int64_t) { return load(kernel); }));
      }
    }
  }
  return ok();
}

}  // namespace anabranch::cuda
