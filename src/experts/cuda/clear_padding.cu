#include "experts/cuda/clear_padding.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 4;   // per CTA
constexpr int kBlocks = 8;  // per SM

// Each warp checks 32 rows at a time. width: words per row.
template <class Bytes>
__global__ void __launch_bounds__(kWarps* kWarp)
    clear_padding_rows(const RowMap map, Bytes* const m, const int64_t R, const int64_t width) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp_index()) * kWarp; first < R;
       first += warps * kWarp) {
    const int64_t row = first + lane_index();
    const bool padding = row < R && map.slot_of(static_cast<int32_t>(row)) < 0;
    for (unsigned lanes = __ballot_sync(kAllLanes, padding); lanes != 0; lanes &= lanes - 1) {
      Bytes* to = m + (first + __ffs(static_cast<int>(lanes)) - 1) * width;
      for (int64_t i = lane_index(); i < width; i += kWarp) to[i] = Bytes{};
    }
  }
}

}  // namespace

ab_status clear_padding(const RowMap& map, const Floats& m, int64_t R, int64_t columns, int multiprocessors,
                        cudaStream_t stream) {
  if (!map.by_slot || R * columns == 0) return ok();
  const int64_t row_bytes = columns * dtype_size(m.dtype);
  constexpr int64_t kRows = kWarps * kWarp;
  const Launch shape{std::min((R + kRows - 1) / kRows, int64_t{kBlocks} * multiprocessors), kRows, 0, stream, true};
  return with_word(common_alignment({address(m.data), static_cast<uintptr_t>(row_bytes)}), [&]<class Bytes>(Bytes) {
    return launch("clear_padding", clear_padding_rows<Bytes>, shape, map, static_cast<Bytes*>(m.data), R,
                  row_bytes / static_cast<int64_t>(sizeof(Bytes)));
  });
}

}  // namespace anabranch::cuda
