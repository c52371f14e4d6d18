#include "dispatch/rows.h"

#include "core/dtype.h"

namespace anabranch::AB_ISA {
namespace {

// Number of columns that are summed at a time: the sums stay in L1 while the rows stream past.
constexpr int64_t kColumns = 512;

// Not inlined: otherwise compilers interchange this loop with the loop over rows and fail to vectorise.
template <class Rows>
[[gnu::noinline]] void add_scaled(const Rows* __restrict row, float weight, int64_t columns, float* __restrict sums) {
  for (int64_t i = 0; i < columns; ++i) sums[i] += weight * to_float(row[i]);
}

template <class Rows, class Out>
void sum_rows(const Rows* rows, int64_t D, const int32_t* index, const float* weights, int64_t count,
              const void* addend, int32_t addend_dtype, Out* out) {
  alignas(64) float sums[kColumns];
  for (int64_t begin = 0; begin < D; begin += kColumns) {
    const int64_t columns = D - begin < kColumns ? D - begin : kColumns;
    for (int64_t i = 0; i < columns; ++i) sums[i] = 0.0f;
    for (int64_t j = 0; j < count; ++j) {
      add_scaled(rows + index[j] * D + begin, weights[j], columns, sums);
    }
    if (addend != nullptr) {
      with_float_type(addend_dtype, [&]<class Addend>(Addend) {
        add_scaled(static_cast<const Addend*>(addend) + begin, 1.0f, columns, sums);
      });
    }
    for (int64_t i = 0; i < columns; ++i) out[begin + i] = from_float<Out>(sums[i]);
  }
}

void sum(const void* rows, int32_t rows_dtype, int64_t D, const int32_t* index, const float* weights, int64_t count,
         const void* addend, int32_t addend_dtype, void* out, int32_t out_dtype) {
  with_float_type(rows_dtype, [&]<class Rows>(Rows) {
    with_float_type(out_dtype, [&]<class Out>(Out) {
      sum_rows(static_cast<const Rows*>(rows), D, index, weights, count, addend, addend_dtype, static_cast<Out*>(out));
    });
  });
}

void scale(const void* x, int32_t x_dtype, int64_t D, float weight, void* out, int32_t out_dtype) {
  with_float_type(x_dtype, [&]<class X>(X) {
    with_float_type(out_dtype, [&]<class Out>(Out) {
      const X* from = static_cast<const X*>(x);
      Out* to = static_cast<Out*>(out);
      for (int64_t i = 0; i < D; ++i) to[i] = from_float<Out>(weight * to_float(from[i]));
    });
  });
}

// Accumulates kLanes interleaved sums, then adds them pairwise: the order is the same for every vector width.
constexpr int64_t kLanes = 64;

template <class A, class B>
float dot_rows(const A* a, const B* b, int64_t D) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= D; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += to_float(a[i + lane]) * to_float(b[i + lane]);
  }
  for (int64_t lane = 0; i + lane < D; ++lane) lanes[lane] += to_float(a[i + lane]) * to_float(b[i + lane]);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

float dot(const void* a, int32_t a_dtype, const void* b, int32_t b_dtype, int64_t D) {
  return with_float_type(a_dtype, [&]<class A>(A) {
    return with_float_type(b_dtype,
                           [&]<class B>(B) { return dot_rows(static_cast<const A*>(a), static_cast<const B*>(b), D); });
  });
}

}  // namespace

const RowKernels kRows = {sum, scale, dot};

}  // namespace anabranch::AB_ISA
