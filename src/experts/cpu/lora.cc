#include "experts/cpu/lora.h"

#include <utility>

#include "core/dtype.h"
#include "core/threads.h"

namespace anabranch {
namespace {

// Whether the last two axes of [E or 1, M, N] are swapped in memory, without gaps.
bool is_contiguous_transposed(const ab_tensor& factor) {
  ab_tensor swapped = factor;
  int64_t strides[] = {stride_of(factor, 0), stride_of(factor, 2), stride_of(factor, 1)};
  std::swap(swapped.shape[1], swapped.shape[2]);
  swapped.strides = strides;
  return is_contiguous(swapped);
}

int64_t columns_of(const ab_tensor& factor) {
  return factor.rank == 4 ? factor.shape[2] * factor.shape[3] : factor.shape[2];
}

// Columns [P, F] of a row.
template <class T>
struct Columns {
  T* data;
  int64_t p_stride;
  int64_t f_stride;
};

template <class From, class To>
void copy_columns(Columns<const From> from, int64_t P, int64_t F, Columns<To> to) {
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t f = 0; f < F; ++f) {
      const float value = to_float(from.data[p * from.p_stride + f * from.f_stride]);
      to.data[p * to.p_stride + f * to.f_stride] = from_float<To>(value);
    }
  }
}

}  // namespace

Factor::Factor(Workspace& workspace, const ab_tensor* tensor, int32_t dtype, int64_t E, bool interleaved)
    : dtype_(dtype), interleaved_(interleaved) {
  if (tensor == nullptr) return;
  shared_ = tensor->shape[0] == 1 && E != 1;
  is_transposed_ = tensor->rank == 3 && stride_of(*tensor, 1) < stride_of(*tensor, 2);
  const bool is_ready = is_transposed_ ? is_contiguous_transposed(*tensor) : is_contiguous(*tensor) && !interleaved;
  if (tensor->dtype == dtype && is_ready) {
    data_ = tensor->data;
    return;
  }
  from_ = tensor;
  data_ = workspace.take_rows(tensor->shape[0] * tensor->shape[1], columns_of(*tensor), dtype);
}

void Factor::fill(int threads, const ab_tensor* group_sizes) const {
  if (from_ == nullptr || data_ == nullptr) return;
  const int32_t row_axis = is_transposed_ ? 2 : 1;
  const int32_t column_axis = from_->rank == 4 ? 3 : 3 - row_axis;
  const int64_t rows = from_->shape[row_axis];
  const int64_t P = from_->rank == 4 ? from_->shape[2] : 1;
  const int64_t F = from_->shape[column_axis];
  const auto* const sizes = shared_ ? nullptr : data<const int32_t>(group_sizes);
  parallel_for(threads, from_->shape[0] * rows, [&](int64_t row, int) {
    if (sizes != nullptr && sizes[row / rows] <= 0) return;
    const int64_t offset = row / rows * stride_of(*from_, 0) + row % rows * stride_of(*from_, row_axis);
    with_float_type(from_->dtype, [&]<class From>(From) {
      with_float_type(dtype_, [&]<class To>(To) {
        const Columns<const From> from{data<const From>(from_) + offset, stride_of(*from_, 2),
                                       stride_of(*from_, column_axis)};
        To* const to = static_cast<To*>(data_) + row * P * F;
        copy_columns(from, P, F, interleaved_ ? Columns<To>{to, 1, P} : Columns<To>{to, F, 1});
      });
    });
  });
}

void copy_factor(int threads, const ab_tensor* factor, const ab_tensor* copy, const ab_tensor* group_sizes) {
  if (copy == nullptr) return;
  const int64_t M = factor->shape[1];
  const bool has_parts = factor->rank == 4;
  const int32_t last = factor->rank - 1;
  const auto* const sizes = factor->shape[0] == group_sizes->shape[0] ? data<const int32_t>(group_sizes) : nullptr;
  parallel_for(threads, factor->shape[0] * M, [&](int64_t row, int) {
    if (sizes != nullptr && sizes[row / M] <= 0) return;
    const auto columns_of_row = [&]<class T>(T, const ab_tensor* tensor) {
      const int64_t offset = row / M * stride_of(*tensor, 0) + row % M * stride_of(*tensor, 1);
      return Columns<T>{data<T>(tensor) + offset, has_parts ? stride_of(*tensor, 2) : 0, stride_of(*tensor, last)};
    };
    with_float_type(factor->dtype, [&]<class From>(From) {
      with_float_type(copy->dtype, [&]<class To>(To) {
        const Columns<From> from = columns_of_row(From{}, factor);
        copy_columns(Columns<const From>{from.data, from.p_stride, from.f_stride}, has_parts ? factor->shape[2] : 1,
                     factor->shape[last], columns_of_row(To{}, copy));
      });
    });
  });
}

void multiply_low_rank(Products& products, int threads, const GroupedRows& rows, const Matrix& x, int64_t D,
                       const ExpertMatrices& a, float factor, const Matrix& u, int64_t rank) {
  RowProduct product{x, a, u, rank, D};
  product.factor = factor;
  multiply_grouped_rows(products, threads, rows, product);
}

Matrix take_low_rank_rows(Workspace& workspace, const ab_tensor* tensor, bool needed, int64_t R, int64_t rank,
                          int32_t dtype) {
  if (tensor != nullptr) return matrix_of(tensor, 0, rank);
  return {workspace.take_rows(needed ? R : 0, rank, dtype), dtype, rank, nullptr};
}

InterleavedGradient::InterleavedGradient(Workspace& workspace, const ab_tensor* gradient, bool needed)
    : gradient_(gradient), interleaved_{} {
  if (!needed) return;
  const int64_t* shape = gradient->shape;
  void* memory = workspace.take_rows(shape[0] * shape[1], columns_of(*gradient), AB_FLOAT32);
  interleaved_ = {memory, AB_FLOAT32, 3, {shape[0], shape[1], columns_of(*gradient)}, nullptr};
}

void InterleavedGradient::store(int threads, bool adds) const {
  const int64_t P = gradient_->shape[2];
  const int64_t F = gradient_->shape[3];
  parallel_for(threads, gradient_->shape[0] * gradient_->shape[1], [&](int64_t row, int) {
    const float* from = data<const float>(&interleaved_) + row * P * F;
    with_float_type(gradient_->dtype, [&]<class T>(T) {
      T* to = data<T>(gradient_) + row * P * F;
      for (int64_t p = 0; p < P; ++p) {
        for (int64_t f = 0; f < F; ++f) {
          const float before = adds ? to_float(to[p * F + f]) : 0.0f;
          to[p * F + f] = from_float<T>(before + from[f * P + p]);
        }
      }
    });
  });
}

}  // namespace anabranch
