#include "experts/cuda/lora.h"

#include <algorithm>

#include "core/cuda/failure.h"
#include "core/tensor.h"
#include "experts/cuda/ops/workspace_sizes.h"

namespace anabranch::cuda {
namespace {

// The axes of a factor as [E or 1, M, P, F], with P = 1 if it has three.
struct Axes {
  int64_t shape[4];
  int64_t strides[4];

  explicit Axes(const ab_tensor& factor) {
    for (int i = 0; i < 4; ++i) {
      const bool is_three = factor.rank == 3;
      const int axis = is_three && i == 3 ? 2 : i;
      shape[i] = is_three && i == 2 ? 1 : factor.shape[axis];
      strides[i] = is_three && i == 2 ? 0 : stride_of(factor, axis);
    }
  }
};

// The strides of a factor without gaps.
void set_strides(const int64_t (&shape)[4], bool transposed, bool interleaved, int64_t (&strides)[4]) {
  const int64_t M = shape[1];
  const int64_t P = shape[2];
  const int64_t F = shape[3];
  const int64_t column = transposed ? M : 1;
  strides[0] = M * P * F;
  strides[1] = transposed ? 1 : P * F;
  strides[2] = interleaved ? column : F * column;
  strides[3] = interleaved ? P * column : column;
}

bool has_strides(const Axes& axes, bool transposed, bool interleaved) {
  int64_t strides[4];
  set_strides(axes.shape, transposed, interleaved, strides);
  for (int i = 0; i < 4; ++i) {
    if (axes.shape[i] > 1 && axes.strides[i] != strides[i]) return false;
  }
  return true;
}

}  // namespace

Factor::Factor(Workspace& workspace, const ab_tensor* tensor, int32_t dtype, int64_t E, FactorOrder order,
               bool interleaved)
    : dtype_(dtype),
      transposed_(order == FactorOrder::columns || order == FactorOrder::free_columns),
      interleaved_(interleaved) {
  if (tensor == nullptr) return;
  shared_ = tensor->shape[0] == 1 && E != 1;
  const Axes axes(*tensor);
  const bool is_free = order == FactorOrder::free_rows || order == FactorOrder::free_columns;
  for (const bool transposed : {transposed_, is_free ? !transposed_ : transposed_}) {
    if (!has_strides(axes, transposed, interleaved)) continue;
    transposed_ = transposed;
    if (tensor->dtype != dtype) break;
    data_ = tensor->data;
    return;
  }
  from_ = tensor;
  data_ = workspace.take_rows(axes.shape[0] * axes.shape[1], axes.shape[2] * axes.shape[3], dtype);
}

void Factor::add_copy(const int32_t* group_sizes, std::vector<StridedCopy>* copies) const {
  if (from_ == nullptr) return;
  const Axes axes(*from_);
  StridedCopy packed{.from = Floats(from_), .to = {data_, dtype_}};
  std::copy_n(axes.shape, 4, packed.shape);
  std::copy_n(axes.strides, 4, packed.from_strides);
  set_strides(axes.shape, transposed_, interleaved_, packed.to_strides);
  if (!shared_) packed.group_sizes = group_sizes;
  copies->push_back(packed);
}

ab_status copy_factors(std::initializer_list<FactorCopy> factors, int64_t E, const int32_t* group_sizes,
                       const Device& device, cudaStream_t stream) {
  std::vector<StridedCopy> copies;
  for (const auto& [from, to] : factors) {
    if (to == nullptr) continue;
    StridedCopy& whole = copies.emplace_back(StridedCopy{.from = Floats(from), .to = Floats(to)});
    std::copy_n(Axes(*from).shape, 4, whole.shape);
    std::copy_n(Axes(*from).strides, 4, whole.from_strides);
    std::copy_n(Axes(*to).strides, 4, whole.to_strides);
    if (from->shape[0] == E) whole.group_sizes = group_sizes;
  }
  return copy(copies, device.multiprocessors, stream);
}

ab_status fill(std::initializer_list<const Factor*> factors, const int32_t* group_sizes, const Device& device,
               cudaStream_t stream) {
  std::vector<StridedCopy> copies;
  for (const Factor* factor : factors) factor->add_copy(group_sizes, &copies);
  return copy(copies, device.multiprocessors, stream);
}

LowRankTerm::LowRankTerm(Workspace& workspace, const void* u, const Factor& b, const GroupedSizes& s, int64_t N,
                         int64_t rank, int32_t dtype, bool fp8)
    : rank_(rank), dtype_(dtype) {
  if (rank == 0) return;
  term_ = {u, b.data(), b.shared(), rank};
  if (!fp8 || padded_rank(rank) == rank) return;
  term_.rank = padded_rank(rank);
  u_ = pad(workspace, u, s.R);
  b_ = pad(workspace, b.data(), (b.shared() ? 1 : s.E) * N);
  term_.u = u_.to;
  term_.b = b_.to;
}

LowRankTerm::Padded LowRankTerm::pad(Workspace& workspace, const void* rows, int64_t count) {
  return {rows, workspace.take_rows(count, term_.rank, dtype_), count};
}

ab_status LowRankTerm::fill(const Device& device, cudaStream_t stream) const {
  std::vector<StridedCopy> copies;
  for (const Padded& padded : {u_, b_}) {
    if (padded.from == nullptr || padded.rows == 0) continue;
    const auto bytes = static_cast<size_t>(padded.rows * term_.rank * dtype_size(dtype_));
    const cudaError_t failure = cudaMemsetAsync(padded.to, 0, bytes, stream);
    if (failure != cudaSuccess) return failed("cudaMemsetAsync", failure);
    copies.push_back({.from = {const_cast<void*>(padded.from), dtype_},
                      .to = {padded.to, dtype_},
                      .shape = {1, padded.rows, 1, rank_},
                      .from_strides = {0, rank_, 0, 1},
                      .to_strides = {0, term_.rank, 0, 1}});
  }
  return copy(copies, device.multiprocessors, stream);
}

RowsProduct product_of(const LowRankRows& u, const Factor& factor, RowsProduct rows) {
  return {.x = u.x,
          .w = factor.data(),
          .transposed = factor.transposed() != u.transposed,
          .group_sizes = rows.group_sizes,
          .y = u.u,
          .map = rows.map,
          .dtype = rows.dtype,
          .precision = rows.precision,
          .R = rows.R,
          .E = rows.E,
          .D = u.D,
          .N = u.rank,
          .thin = true,
          .factor = u.scale,
          .shared_w = factor.shared(),
          .gathers_x = u.gathers_x};
}

void* take_low_rank_rows(Workspace& workspace, const ab_tensor* tensor, bool needed, int64_t R, int64_t rank,
                         int32_t dtype) {
  if (tensor != nullptr) return tensor->data;
  return workspace.take_rows(needed ? R : 0, rank, dtype);
}

}  // namespace anabranch::cuda
