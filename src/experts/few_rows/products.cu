#include "experts/few_rows/products.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/tensor.h"

namespace anabranch::cuda::few_rows {
namespace {

constexpr int64_t kMostRows = 1024;              // bounded by the list in shared memory
constexpr int64_t kMostRowsOfExpert = 4;         // on average
constexpr int64_t kMostSize = int64_t{1} << 20;  // kernels index in int32
constexpr double kMostElements = 2e9;            // weight elements read; above this, tiles are as fast

// Estimates the weights that are read: the expected number of experts with rows if rows are assigned uniformly at
// random. columns: all stored columns, so that a window of columns takes the same path as the whole.
bool are_few(int64_t R, int64_t E, int64_t columns, int64_t k) {
  if (R > std::min(kMostRowsOfExpert * E, kMostRows)) return false;
  const auto experts = static_cast<double>(E);
  const double used = experts * (1.0 - std::pow(1.0 - 1.0 / experts, static_cast<double>(R)));
  return used * static_cast<double>(columns) * static_cast<double>(k) <= kMostElements;
}

bool are_counted(std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0 && size <= kMostSize; });
}

bool are_16_bit(int32_t dtype) { return dtype == AB_BFLOAT16 || dtype == AB_FLOAT16; }

// Rows of k elements consist of whole, aligned 16-byte chunks.
bool are_chunks(const void* data, int64_t k) { return reinterpret_cast<uintptr_t>(data) % 16 == 0 && k % 8 == 0; }

}  // namespace

bool takes(const Up& up) {
  const FfnSizes& s = up.s;
  return s.layout.in_transposed && are_16_bit(up.x.dtype) && up.w_in.dtype == up.x.dtype &&
         are_counted({s.R, s.E, s.D, s.P * s.F}) && are_few(s.R, s.E, s.P * s.F, s.D) && up.map.sources() > 0 &&
         are_chunks(up.x.data, s.D) && are_chunks(up.w_in.data, s.D);
}

bool takes(const RowsProduct& p) {
  return p.transposed && are_16_bit(p.dtype) && are_counted({p.R, p.E, p.D, p.stored_columns()}) &&
         are_few(p.R, p.E, p.stored_columns(), p.D) && are_chunks(p.x, p.D) && are_chunks(p.w, p.D);
}

}  // namespace anabranch::cuda::few_rows
