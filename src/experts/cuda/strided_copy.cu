#include "experts/cuda/strided_copy.h"

#include <algorithm>
#include <array>

#include "core/cuda/divisor.h"
#include "core/cuda/launch.h"
#include "experts/cuda/ops/counts.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;  // per SM
constexpr int kEach = 4;    // elements per thread of one piece

// The axes in the order of `to` in memory, outermost first, so that adjacent threads write adjacent elements. A matrix
// is everything below the outermost axis.
struct Copy {
  StridedCopy of;
  int64_t pieces = 0;  // of all matrices
  int32_t pieces_of_matrix = 0;
  int32_t matrix = 0;  // elements
  Divisor by_plane{};  // the last two axes
  Divisor by_row{};    // the last axis
  int32_t plane = 0;
  int32_t row = 0;
};

template <class From, class To>
__global__ void __launch_bounds__(kThreads) copy_elements(const Copy copy) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StridedCopy& of = copy.of;
  for (int64_t piece = blockIdx.x; piece < copy.pieces; piece += gridDim.x) {
    const int64_t outer = piece / copy.pieces_of_matrix;
    const int32_t first = static_cast<int32_t>(piece % copy.pieces_of_matrix) * (kThreads * kEach);
    const From* const from = static_cast<const From*>(of.from.data) + outer * of.from_strides[0];
    To* const to = static_cast<To*>(of.to.data) + outer * of.to_strides[0];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t element = first + i * kThreads + static_cast<int32_t>(threadIdx.x);
      if (element >= copy.matrix) continue;
      const int32_t a = copy.by_plane.quotient(element);
      const int32_t in_plane = element - a * copy.plane;
      const int32_t b = copy.by_row.quotient(in_plane);
      const int32_t c = in_plane - b * copy.row;
      const int64_t source = a * of.from_strides[1] + b * of.from_strides[2] + c * of.from_strides[3];
      const int64_t target = a * of.to_strides[1] + b * of.to_strides[2] + c * of.to_strides[3];
      const float before = of.adds ? to_float(to[target]) : 0.0f;
      const float value = to_float(from[source]);
      to[target] = from_float<To>(of.adds ? before + value : value);
    }
  }
}

}  // namespace

ab_status copy(const StridedCopy& of, int multiprocessors, cudaStream_t stream) {
  if (of.shape[0] * of.shape[1] * of.shape[2] * of.shape[3] == 0) return ok();
  std::array<int, 4> axes = {0, 1, 2, 3};
  std::stable_sort(axes.begin(), axes.end(), [&](int a, int b) { return of.to_strides[a] > of.to_strides[b]; });
  Copy copy{.of = of};
  for (int i = 0; i < 4; ++i) {
    copy.of.shape[i] = of.shape[axes[i]];
    copy.of.from_strides[i] = of.from_strides[axes[i]];
    copy.of.to_strides[i] = of.to_strides[axes[i]];
  }
  const int64_t* shape = copy.of.shape;
  const int64_t matrix = shape[1] * shape[2] * shape[3];
  AB_RETURN_IF_ERROR(check_counts({{"elements of a factor's matrix", matrix}}));
  copy.matrix = static_cast<int32_t>(matrix);
  copy.plane = static_cast<int32_t>(shape[2] * shape[3]);
  copy.row = static_cast<int32_t>(shape[3]);
  copy.by_plane = Divisor(copy.plane);
  copy.by_row = Divisor(copy.row);
  copy.pieces_of_matrix = (copy.matrix - 1) / (kThreads * kEach) + 1;
  copy.pieces = shape[0] * copy.pieces_of_matrix;
  const Launch launched{std::min(copy.pieces, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true};
  return with_float_type(of.from.dtype, [&]<class From>(From) {
    return with_float_type(
        of.to.dtype, [&]<class To>(To) { return launch("strided copy", copy_elements<From, To>, launched, copy); });
  });
}

}  // namespace anabranch::cuda
