#include "experts/hopper/ffn_product.h"

#include "experts/hopper/choose.h"

#include <algorithm>

#include "experts/hopper/gathered.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/row_tiles.cuh"

namespace anabranch::cuda {

bool fits_tensor_cores(const FfnProduct& p, const RowSource& rows, std::initializer_list<const void*> hidden) {
  constexpr int64_t kMostIndices = int64_t{1} << 30;  // of terms and columns with a tile more, of rows
  static_assert(kMostIndices <= kMostWindowRows);
  const auto counts = [](int64_t size) { return size > 0 && size <= kMostIndices; };
  const auto fits = [&](const void* data) { return data == nullptr || fits_tensor_map(data, p.dtype, p.F); };
  constexpr int64_t kLeastColumns = Tile128x128::kColumns / 2;  // of F in a tile: half are the gate's
  return (p.dtype == AB_BFLOAT16 || p.dtype == AB_FLOAT16) && counts(p.R) && counts(p.E) && counts(p.D) &&
         counts(p.P * p.F) &&
         most_row_tiles(p.R, p.E, Tile128x128::kRows) * ceil_div(p.F, kLeastColumns) <= kMostIndices &&
         fits_operand(rows, p.dtype, p.D) && std::all_of(hidden.begin(), hidden.end(), fits);
}

}  // namespace anabranch::cuda
