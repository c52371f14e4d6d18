// A warp sums the rows of a few tokens at a time, and meanwhile copies those of the next tokens to shared memory. So
// many copies are in flight that an SM is at the limit of what it can read.
#include "dispatch/sum_tokens.h"

#include <algorithm>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/tile_memory.cuh"
#include "core/dtype.h"
#include "dispatch/columns.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kN = 8;  // elements per access
constexpr int kVectors = 2;
using Part = Columns<kN, kVectors>;  // of a row, 1 KiB
constexpr int kMostWarps = 12;
constexpr int kRows = 8;    // of a batch
constexpr int kStages = 2;  // batches of a warp that are being copied or summed
constexpr int kBatchVectors = kRows * kVectors * kWarp;
constexpr size_t kWarpBytes = size_t{kStages} * kBatchVectors * kAccessBytes;

__device__ __forceinline__ unsigned warps() { return blockDim.x / kWarp; }

// Sizes that the kernel computes with often: of 32 bits.
struct Items {
  unsigned K;
  unsigned tokens;  // of an item
  unsigned parts;   // of a row
  unsigned count;
  unsigned row_bytes;
  unsigned T;        // of all places
  unsigned place_T;  // of a place
};

// A position of a warp in its items. An item is a part of the rows of up to 32 / K tokens; lane i knows their slot i.
// Warps take turns with the items, and make batches of up to kRows listed rows of an item, at least one batch.
template <bool kHasWeights>
class Cursor {
 public:
  __device__ __forceinline__ Cursor(const GatherSum& sum, const Items& items)
      : sum_(sum), items_(items), item_(blockIdx.x * warps() + warp_index()) {
    read(item_);
    begin();
  }

  __device__ __forceinline__ bool has_item() const { return item_ < items_.count; }
  __device__ __forceinline__ unsigned first_token() const { return item_ / items_.parts * items_.tokens; }
  __device__ __forceinline__ unsigned part() const { return item_ % items_.parts; }
  __device__ __forceinline__ bool ends_item() const { return left_ == 0; }

  // The lane of the next listed slot of the item.
  __device__ __forceinline__ int next_lane() {
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    return lane;
  }
  __device__ __forceinline__ unsigned row_of(int lane) const {
    return static_cast<unsigned>(__shfl_sync(kAllLanes, row_, lane));
  }
  __device__ __forceinline__ float weight_of(int lane) const { return __shfl_sync(kAllLanes, weight_, lane); }

  __device__ __forceinline__ void next_item() {
    item_ += gridDim.x * warps();
    begin();
  }

 private:
  // Reads slots ahead of their use.
  __device__ __forceinline__ void read(unsigned item) {
    next_row_ = -1;
    if (item >= items_.count) return;
    const unsigned first = item / items_.parts * items_.tokens;
    const unsigned tokens = min(items_.tokens, items_.T - first);
    if (static_cast<unsigned>(lane_index()) >= tokens * items_.K) return;
    const int64_t slot = static_cast<int64_t>(first) * items_.K + lane_index();
    next_row_ = sum_.maps.row_of_slot[slot];
    if constexpr (kHasWeights) next_weight_ = sum_.weights[slot];
  }
  __device__ __forceinline__ void begin() {
    row_ = next_row_;
    weight_ = next_weight_;
    left_ = __ballot_sync(kAllLanes, Maps::is_index(row_, sum_.maps.R));
    read(item_ + gridDim.x * warps());
  }

  const GatherSum& sum_;
  const Items& items_;
  unsigned item_;
  int32_t row_ = -1, next_row_ = -1;
  float weight_ = 0.0f, next_weight_ = 0.0f;
  unsigned left_ = 0;
};

template <class Row, class Out>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    sum_tokens(const GatherSum sum, const __grid_constant__ Places places, const __grid_constant__ Items items) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  uint4* const mine =
      dynamic_shared_array<uint4>() + warp_index() * kStages * kBatchVectors + static_cast<unsigned>(lane_index());
  const uint32_t mine_address = shared_address(mine);
  const int64_t width = sum.rows.D;
  const unsigned token_factor = (1u << 16) / items.K + 1;  // lane / K = lane * factor >> 16

  Cursor<false> ahead(sum, items);
  const auto copy_batch = [&](int stage) {
    if (ahead.has_item()) {
      const Part columns(ahead.part(), width);
      const char* const from = static_cast<const char*>(sum.rows.data) + columns.first * sizeof(Row);
      uint32_t to = mine_address + static_cast<uint32_t>(stage * kBatchVectors * kAccessBytes);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (ahead.ends_item()) break;
        const char* const row = from + static_cast<uint64_t>(ahead.row_of(ahead.next_lane())) * items.row_bytes;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (v < columns.count) copy_async_16(to + v * kWarp * kAccessBytes, row + v * kWarp * kAccessBytes);
        }
        to += kVectors * kWarp * kAccessBytes;
      }
      if (ahead.ends_item()) ahead.next_item();
    }
    end_copy_group();
  };
  for (int stage = 0; stage < kStages; ++stage) copy_batch(stage);

  float sums[kVectors][kN] = {};
  unsigned token = 0;  // of the item
  int stage = 0;
  for (Cursor<true> at(sum, items); at.has_item();) {
    const Part columns(at.part(), width);
    const unsigned first = at.first_token();
    const auto end_token = [&] {
      const unsigned t = first + token++;
      const unsigned place = t / items.place_T;
      char* const to = static_cast<char*>(places.data[place]) + columns.first * sizeof(Out);
      Vectors<Out, kN, kVectors> out;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        out.vectors[v] = Vector<Out, kN>::from(sums[v]);
#pragma unroll
        for (int j = 0; j < kN; ++j) sums[v][j] = 0.0f;
      }
      out.store(reinterpret_cast<Out*>(to + static_cast<uint64_t>(t - place * items.place_T) * items.row_bytes),
                columns.count);
    };

    wait_for_copies<kStages - 1>();  // each lane reads only what it copied itself
    const uint4* from = mine + stage * kBatchVectors;
    for (int i = 0; i < kRows && !at.ends_item(); ++i, from += kVectors * kWarp) {
      const int lane = at.next_lane();
      const float weight = at.weight_of(lane);
      const unsigned owner = static_cast<unsigned>(lane) * token_factor >> 16;
      while (token < owner) end_token();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Vector<Row, kN> row;
        row.bytes = from[v * kWarp];
#pragma unroll
        for (int j = 0; j < kN; ++j) {  // round the product before the addition, as the CPU does
          sums[v][j] = __fadd_rn(sums[v][j], __fmul_rn(weight, row[j]));
        }
      }
    }
    copy_batch(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (at.ends_item()) {
      const unsigned end = min(items.tokens, items.T - first);
      while (token < end) end_token();
      token = 0;
      at.next_item();
    }
  }
}

template <class Row, class Out>
ab_status launch_sums(const GatherSum& sum, const Places& places, const Device& device, int64_t blocks,
                      cudaStream_t stream) {
  const int64_t tokens = kWarp / sum.maps.K;
  const int64_t parts = Part::parts(sum.rows.D);
  const int64_t count = (sum.maps.T + tokens - 1) / tokens * parts;
  AB_RETURN_IF_ERROR(check_blocks("combine", count));
  const auto narrow = [](int64_t value) { return static_cast<unsigned>(value); };
  const Items items{
      narrow(sum.maps.K), narrow(tokens),  narrow(parts), narrow(count), narrow(sum.rows.D * int64_t{sizeof(Row)}),
      narrow(sum.maps.T), narrow(places.T)};
  const auto fitting = static_cast<int>(static_cast<size_t>(device.max_block_shared_bytes) / kWarpBytes);
  const int warps = std::min(fitting, kMostWarps);
  const Launch shape{std::min((count + warps - 1) / warps, blocks), warps * kWarp,
                     static_cast<size_t>(warps) * kWarpBytes, stream, true};
  return launch("combine", sum_tokens<Row, Out>, shape, sum, places, items);
}

}  // namespace

bool fits_token_sums(int64_t K, int32_t dtype_of_rows, int32_t dtype_of_sums) {
  return K > 0 && K <= kWarp && dtype_size(dtype_of_rows) == 2 && dtype_size(dtype_of_sums) == 2;
}

ab_status compute_token_sums(const GatherSum& sum, const Places& places, const Device& device, int64_t blocks,
                             cudaStream_t stream) {
  if (sum.rows.D == 0) return ok();
  return with_float_type(sum.rows.dtype, [&]<class Row>(Row) {
    return with_float_type(sum.out.dtype, [&]<class Out>(Out) {
      if constexpr (sizeof(Row) == 2 && sizeof(Out) == 2)
        return launch_sums<Row, Out>(sum, places, device, blocks, stream);
      return AB_INVALID("combine: got dtypes of %zu and %zu bytes, expected 2", sizeof(Row), sizeof(Out));
    });
  });
}

}  // namespace anabranch::cuda
