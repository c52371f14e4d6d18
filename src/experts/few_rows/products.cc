#include "experts/few_rows/products.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/tensor.h"

namespace anabranch::cuda::few_rows {
namespace {

constexpr int64_t kMaxRows = 1024;              // bounded by the list in shared memory
constexpr int64_t kMaxRowsPerExpert = 4;        // on average
constexpr int64_t kMaxSize = int64_t{1} << 20;  // kernels index in int32
constexpr double kMaxElements = 2e9;            // weight elements read; above this, tiles are as fast

// Estimates the weights that are read: the expected number of experts with rows if rows are assigned uniformly at
// random. columns: all stored columns, so that a window of columns takes the same path as the whole.
bool is_small_m(int64_t R, int64_t E, int64_t columns, int64_t k) {
  if (R > std::min(kMaxRowsPerExpert * E, kMaxRows)) return false;
  const auto experts = static_cast<double>(E);
  const double used = experts * (1.0 - std::pow(1.0 - 1.0 / experts, static_cast<double>(R)));
  return used * static_cast<double>(columns) * static_cast<double>(k) <= kMaxElements;
}

bool sizes_fit(std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0 && size <= kMaxSize; });
}

bool is_16_bit(int32_t dtype) { return dtype == AB_BFLOAT16 || dtype == AB_FLOAT16; }

// Whether rows of k elements consist of whole, aligned 16-byte chunks.
bool are_aligned_chunks(const void* data, int64_t k) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && k % 8 == 0;
}

// A low-rank term must have rows and factors of whole, aligned 16-byte chunks too.
bool is_aligned(const LowRank& term) {
  return term.rank == 0 ||
         (sizes_fit({term.rank}) && are_aligned_chunks(term.u, term.rank) && are_aligned_chunks(term.b, term.rank));
}

}  // namespace

bool supports(const Up& up) {
  const FfnSizes& s = up.s;
  return is_aligned(up.low_rank) && s.layout.in_transposed && is_16_bit(up.x.dtype) && up.w_in.dtype == up.x.dtype &&
         sizes_fit({s.R, s.E, s.D, s.P * s.F}) && is_small_m(s.R, s.E, s.P * s.F, s.D) && up.map.sources() > 0 &&
         are_aligned_chunks(up.x.data, s.D) && are_aligned_chunks(up.w_in.data, s.D);
}

bool supports(const RowsProduct& p) {
  const bool has_sources = !p.gathers_x || p.map.sources() > 0;
  return is_aligned(p.low_rank) && has_sources && p.transposed && is_16_bit(p.dtype) &&
         sizes_fit({p.R, p.E, p.D, p.stored_columns()}) && is_small_m(p.R, p.E, p.stored_columns(), p.D) &&
         are_aligned_chunks(p.x, p.D) && are_aligned_chunks(p.w, p.D);
}

}  // namespace anabranch::cuda::few_rows
