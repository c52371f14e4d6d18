#include "experts/cuda/strided_copy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "core/cuda/divisor.h"
#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/tensor.h"
#include "experts/cuda/ops/counts.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 8;  // per SM
constexpr int kEach = 4;    // vectors per thread of one piece
constexpr int kMaxWidth = 4;
constexpr int kMaxCopies = 4;  // per launch
// Tiles of transposing copies: elements along the last axis of `from`, and along the last axis of `to`. Copies with
// fewer than half a tile along either axis copy element by element.
constexpr int kTile = 64;
constexpr int kMinTransposed = kTile / 2;
constexpr int kPair = 2;  // elements that a transposing copy writes at a time, if they are aligned

// The axes in the order of `to` in memory, outermost first, so that adjacent threads write adjacent elements. A matrix
// is everything below the outermost axis.
struct Copy {
  StridedCopy of;
  int64_t pieces = 0;  // of all matrices
  int32_t pieces_of_matrix = 0;
  int32_t matrix = 0;  // vectors
  Divisor by_plane{};  // the last two axes
  Divisor by_row{};    // the last axis
  int32_t plane = 0;
  int32_t row = 0;    // vectors
  int32_t width = 1;  // elements of a vector
  bool transposes = false;
};

// Copies that one launch makes.
struct Copies {
  int64_t ends[kMaxCopies];  // of each copy's pieces in the pieces of all
  Copy copies[kMaxCopies];
};

// A piece of one matrix of a copy.
struct Piece {
  const Copy& copy;
  int64_t matrix;
  int32_t index;    // among the pieces of the matrix
  bool is_skipped;  // the matrix has no rows
};

// number: that of the piece among the pieces of all copies. copy: the index of an earlier piece's copy, which becomes
// that of this piece.
__device__ __forceinline__ Piece find_piece(const Copies& all, int64_t number, int* copy) {
  while (number >= all.ends[*copy]) ++*copy;
  const Copy& found = all.copies[*copy];
  const int64_t in_copy = number - (*copy == 0 ? 0 : all.ends[*copy - 1]);
  const int64_t matrix = in_copy / found.pieces_of_matrix;
  const int32_t* const sizes = found.of.group_sizes;
  return {found, matrix, static_cast<int32_t>(in_copy % found.pieces_of_matrix),
          sizes != nullptr && sizes[matrix] <= 0};
}

// A thread copies kWidth adjacent elements at a time.
template <class From, class To, int kWidth>
__global__ void __launch_bounds__(kThreads) copy_elements(const __grid_constant__ Copies all) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int index = 0;
  for (int64_t next = blockIdx.x; next < all.ends[kMaxCopies - 1]; next += gridDim.x) {
    const Piece piece = find_piece(all, next, &index);
    if (piece.is_skipped) continue;
    const Copy& copy = piece.copy;
    const StridedCopy& of = copy.of;
    const int32_t first = piece.index * (kThreads * kEach);
    const From* const from = static_cast<const From*>(of.from.data) + piece.matrix * of.from_strides[0];
    To* const to = static_cast<To*>(of.to.data) + piece.matrix * of.to_strides[0];
    Vector<From, kWidth> read[kEach];
    To* targets[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t vector = first + i * kThreads + static_cast<int32_t>(threadIdx.x);
      targets[i] = nullptr;
      if (vector >= copy.matrix) continue;
      const int32_t a = copy.by_plane.quotient(vector);
      const int32_t in_plane = vector - a * copy.plane;
      const int32_t b = copy.by_row.quotient(in_plane);
      const int32_t c = (in_plane - b * copy.row) * kWidth;
      targets[i] = to + (a * of.to_strides[1] + b * of.to_strides[2] + c * of.to_strides[3]);
      read[i].load(from + (a * of.from_strides[1] + b * of.from_strides[2] + c * of.from_strides[3]));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (targets[i] == nullptr) continue;
      float values[kWidth];
      Vector<To, kWidth> before;
      if (of.adds) before.load(targets[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = of.adds ? before[j] + read[i][j] : read[i][j];
      Vector<To, kWidth>::from(values).store_if(true, targets[i]);
    }
  }
}

template <class To>
struct alignas(kPair * sizeof(To)) Pair {
  To elements[kPair];
};

// Copies tiles by way of shared memory where adjacent elements of `from` are along axis 2 and those of `to` along axis
// 3, so that both are accessed in whole sectors. A piece is a tile.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) transpose_elements(const __grid_constant__ Copies all) {
  __shared__ float tile[kTile][kTile + 1];  // one more column: fewer bank conflicts
  wait_for_previous_kernel();
  let_next_kernel_start();
  int index = 0;
  for (int64_t next = blockIdx.x; next < all.ends[kMaxCopies - 1]; next += gridDim.x) {
    const Piece piece = find_piece(all, next, &index);
    if (piece.is_skipped) continue;
    const StridedCopy& of = piece.copy.of;
    const auto columns = static_cast<int32_t>(of.shape[2]);
    const auto rows = static_cast<int32_t>(of.shape[3]);
    const int32_t row_tiles = (rows + kTile - 1) / kTile;
    const int32_t column_tiles = (columns + kTile - 1) / kTile;
    const int32_t first_row = piece.index % row_tiles * kTile;
    const int32_t first_column = piece.index / row_tiles % column_tiles * kTile;
    const int32_t a = piece.index / row_tiles / column_tiles;
    const From* const from =
        static_cast<const From*>(of.from.data) + piece.matrix * of.from_strides[0] + a * of.from_strides[1];
    To* const to = static_cast<To*>(of.to.data) + piece.matrix * of.to_strides[0] + a * of.to_strides[1];
    const auto thread = static_cast<int32_t>(threadIdx.x);
    // The new value of an element.
    const auto value = [&](const To* old, float copied) {
      return from_float<To>(of.adds ? to_float(*old) + copied : copied);
    };
#pragma unroll
    for (int i = 0; i < kTile; i += kThreads / kTile) {
      const int32_t row = i + thread / kTile;
      const int32_t column = thread % kTile;
      if (first_row + row < rows && first_column + column < columns) {
        tile[row][column] = to_float(from[first_column + column + (first_row + row) * of.from_strides[3]]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; i += kThreads / (kTile / kPair)) {
      const int32_t row = thread % (kTile / kPair) * kPair;
      const int32_t column = i + thread / (kTile / kPair);
      if (first_row + row >= rows || first_column + column >= columns) continue;
      To* const target = to + ((first_column + column) * of.to_strides[2] + first_row + row);
      if (piece.copy.width == kPair) {
        auto* const pair = reinterpret_cast<Pair<To>*>(target);
        Pair<To> written;
        if (of.adds) written = *pair;
#pragma unroll
        for (int j = 0; j < kPair; ++j) written.elements[j] = value(written.elements + j, tile[row + j][column]);
        *pair = written;
        continue;
      }
      for (int j = 0; j < min(rows - first_row - row, kPair); ++j) {
        target[j] = value(target + j, tile[row + j][column]);
      }
    }
    __syncthreads();
  }
}

// Merges axes that are adjacent in both tensors, so that a copy without a change of order has one long row. Axes of
// size 1 are then outside the other axes of a matrix.
void merge_axes(StridedCopy* copy) {
  constexpr int64_t kMaxRow = int64_t{1} << 29;
  for (int outer = 2; outer >= 0; --outer) {
    int inner = outer + 1;
    while (inner < 3 && copy->shape[inner] == 1) ++inner;
    // A matrix, everything below axis 0, must stay small enough to count.
    const int64_t all = copy->shape[0] * copy->shape[1] * copy->shape[2] * copy->shape[3];
    if (outer == 0 && (all > kMaxRow || copy->group_sizes != nullptr)) break;
    const bool adjacent = copy->from_strides[outer] == copy->shape[inner] * copy->from_strides[inner] &&
                          copy->to_strides[outer] == copy->shape[inner] * copy->to_strides[inner];
    if (copy->shape[inner] == 1) {
      copy->from_strides[inner] = copy->from_strides[outer];
      copy->to_strides[inner] = copy->to_strides[outer];
    } else if (copy->shape[outer] != 1 && (!adjacent || copy->shape[outer] > kMaxRow / copy->shape[inner])) {
      continue;
    }
    copy->shape[inner] *= copy->shape[outer];
    copy->shape[outer] = 1;
  }
  if (copy->shape[2] != 1) return;
  for (int64_t* const of : {copy->shape, copy->from_strides, copy->to_strides}) std::swap(of[1], of[2]);
}

// Whether a transposing copy can write pairs of elements.
bool has_pairs(const StridedCopy& copy) {
  const bool whole = copy.shape[3] % kPair == 0 && copy.to_strides[2] % kPair == 0 && copy.to_strides[1] % kPair == 0 &&
                     copy.to_strides[0] % kPair == 0;
  return whole && address(copy.to.data) % (kPair * dtype_size(copy.to.dtype)) == 0;
}

// Whether rows of both tensors are whole vectors of kWidth elements at aligned addresses.
bool has_vectors(const StridedCopy& copy, int width) {
  const auto aligned = [&](const Floats& m) { return address(m.data) % (width * dtype_size(m.dtype)) == 0; };
  if (copy.from_strides[3] != 1 || copy.to_strides[3] != 1 || copy.shape[3] % width != 0) return false;
  for (int i = 0; i < 3; ++i) {
    const bool whole = copy.from_strides[i] % width == 0 && copy.to_strides[i] % width == 0;
    if (copy.shape[i] > 1 && !whole) return false;
  }
  return aligned(copy.from) && aligned(copy.to);
}

// Orders and merges the axes of a copy, and counts its vectors.
ab_status prepare(const StridedCopy& of, Copy* copy) {
  std::array<int, 4> axes = {0, 1, 2, 3};
  std::stable_sort(axes.begin(), axes.end(), [&](int a, int b) { return of.to_strides[a] > of.to_strides[b]; });
  *copy = {.of = of};
  for (int i = 0; i < 4; ++i) {
    copy->of.shape[i] = of.shape[axes[i]];
    copy->of.from_strides[i] = of.from_strides[axes[i]];
    copy->of.to_strides[i] = of.to_strides[axes[i]];
  }
  merge_axes(&copy->of);
  const int64_t* shape = copy->of.shape;
  copy->width = has_vectors(copy->of, kMaxWidth) ? kMaxWidth : 1;
  copy->transposes = copy->of.from_strides[2] == 1 && copy->of.to_strides[3] == 1 && copy->of.from_strides[3] != 1 &&
                     shape[2] >= kMinTransposed && shape[3] >= kMinTransposed;
  const int64_t matrix = shape[1] * shape[2] * shape[3] / copy->width;
  AB_RETURN_IF_ERROR(check_counts({{"elements of a factor's matrix", matrix}}));
  copy->matrix = static_cast<int32_t>(matrix);
  copy->row = static_cast<int32_t>(shape[3] / copy->width);
  copy->plane = static_cast<int32_t>(shape[2]) * copy->row;
  copy->by_plane = Divisor(copy->plane);
  copy->by_row = Divisor(copy->row);
  copy->pieces_of_matrix = (copy->matrix - 1) / (kThreads * kEach) + 1;
  if (copy->transposes) {
    copy->width = has_pairs(copy->of) ? kPair : 1;
    const int64_t tiles = shape[1] * ((shape[2] - 1) / kTile + 1) * ((shape[3] - 1) / kTile + 1);
    copy->pieces_of_matrix = static_cast<int32_t>(tiles);  // fewer than elements
  }
  copy->pieces = shape[0] * copy->pieces_of_matrix;
  return ok();
}

}  // namespace

ab_status copy(std::span<const StridedCopy> copies, int multiprocessors, cudaStream_t stream) {
  std::vector<Copy> left;
  for (const StridedCopy& of : copies) {
    if (of.shape[0] * of.shape[1] * of.shape[2] * of.shape[3] == 0) continue;
    AB_RETURN_IF_ERROR(prepare(of, &left.emplace_back()));
  }
  // Each launch makes the copies that need the same kernel as the first one left.
  while (!left.empty()) {
    const Copy first = left.front();
    const auto is_other = [&](const Copy& copy) {
      return (copy.width != first.width && !copy.transposes) || copy.transposes != first.transposes ||
             copy.of.from.dtype != first.of.from.dtype || copy.of.to.dtype != first.of.to.dtype;
    };
    const auto same = std::stable_partition(left.begin(), left.end(), is_other);
    const auto begin = left.end() - std::min<std::ptrdiff_t>(left.end() - same, kMaxCopies);
    Copies all{};
    int64_t pieces = 0;
    for (int i = 0; i < kMaxCopies; ++i) {
      if (i < left.end() - begin) {
        all.copies[i] = begin[i];
        pieces += begin[i].pieces;
      }
      all.ends[i] = pieces;
    }
    left.erase(begin, left.end());
    const Launch launched{std::min(pieces, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true};
    AB_RETURN_IF_ERROR(with_float_type(first.of.from.dtype, [&]<class From>(From) {
      return with_float_type(first.of.to.dtype, [&]<class To>(To) {
        const auto kernel = first.transposes   ? transpose_elements<From, To>
                            : first.width == 1 ? copy_elements<From, To, 1>
                                               : copy_elements<From, To, kMaxWidth>;
        return launch("strided copy", kernel, launched, all);
      });
    }));
  }
  return ok();
}

}  // namespace anabranch::cuda
