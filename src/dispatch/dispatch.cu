// ab_cuda_dispatch: each warp reads a part of a token once and writes it to the row of each of the token's slots.
#include "anabranch/cuda.h"
#include "core/entry.h"
#include "core/range.h"
#include "dispatch/slots.cuh"
#include "dispatch/spread.cuh"

namespace anabranch::cuda {
namespace {

// X and To are float types, or both the same Word if rows are copied bytewise.
template <class X, class To, int N>
__global__ void __launch_bounds__(PartsBlock::kThreads) spread_tokens(const Spread spread, const SpreadGrid grid) {
  constexpr bool kCopies = !kIsFloat<X>;
  __shared__ int32_t rows[PartsBlock::kWarps][SlotList::kCapacity];
  __shared__ int32_t slots[PartsBlock::kWarps][kCopies ? 1 : SlotList::kCapacity];
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x < grid.clearing) {
    clear_rows<To, N>(spread, grid);
    return;
  }
  const Maps& maps = spread.maps;
  const int64_t item = (blockIdx.x - grid.clearing) * PartsBlock::kWarps + warp_index();
  const int64_t t = item / grid.parts;
  if (t >= maps.T) return;
  const Columns<N> columns(item - t * grid.parts, grid.width);
  Vectors<X, N> x;
  x.load(reinterpret_cast<const X*>(spread.x.data) + t * grid.width + columns.first, columns.count);
  To* to = reinterpret_cast<To*>(spread.to.data) + columns.first;
  const int warp = warp_index();
  list_slots(
      maps, t, [&](int32_t slot, int32_t row) { return Maps::is_index(row, maps.R) && maps.slot_of_row[row] == slot; },
      [&](int place, int32_t slot, int32_t row) {
        rows[warp][place] = row;
        if constexpr (!kCopies) slots[warp][place] = slot;
      },
      [&](int count) {
        for (int i = 0; i < count; ++i) {
          To* row = to + rows[warp][i] * grid.width;
          if constexpr (kCopies) {
            x.store(row, columns.count);
          } else {
            scaled<To>(x, spread.weights[slots[warp][i]]).store(row, columns.count);
          }
        }
      });
}

template <class X, class To, int N>
ab_status launch_width(const Spread& spread, int64_t width, cudaStream_t stream) {
  const SpreadGrid grid{width, Columns<N>::parts(width), SpreadGrid::clearing_blocks(spread)};
  const int64_t blocks = grid.clearing + (spread.maps.T * grid.parts + PartsBlock::kWarps - 1) / PartsBlock::kWarps;
  return launch("dispatch", spread_tokens<X, To, N>, {blocks, PartsBlock::kThreads, 0, stream, true}, spread, grid);
}

}  // namespace

ab_status launch_spread(const Spread& spread, cudaStream_t stream) {
  const auto& x = spread.x;
  const auto& to = spread.to;
  if (to.data == nullptr || x.D == 0) return ok();
  if (spread.copies()) {
    const int bytes = common_alignment({address(x.data), address(to.data), static_cast<uintptr_t>(x.bytes)});
    return with_word(bytes, [&]<class Bytes>(Bytes) {
      return launch_width<Bytes, Bytes, 1>(spread, x.bytes / static_cast<int64_t>(sizeof(Bytes)), stream);
    });
  }
  return with_row_types(x, to, [&]<class X, class To, int N>(X, To, std::integral_constant<int, N>) {
    return launch_width<X, To, N>(spread, x.D, stream);
  });
}

}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_dispatch(const ab_dispatch_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::dispatch);
  Spread spread;
  AB_RETURN_IF_ERROR(check_dispatch(args, &spread));
  return cuda::launch_spread(spread, cuda::stream_of(exec));
}
