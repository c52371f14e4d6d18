// Grouped GEMM on mma.sync (sm80 and newer). CTAs are persistent: two or three per SM with four warps each, or one
// with eight warps. All warps copy k-blocks of both operands into a ring of stages (cp.async), several k-blocks ahead
// of the one they multiply, then pass the accumulators to the epilogue through shared memory. Packed weights are copied
// packed to the place of their k-block, and decoded there one k-block ahead.
//
//   shared memory
//   main loop   [kStages] { A: kBytesA, B: kBytesB }             one barrier per k-block
//   epilogue    [kStagedRows][kTileColumns + padding] float      aliases the stages; one fragment row per warp
//               [kRows] float                                    row weights
//   separate    the current tile, and the assignments of its rows
#pragma once

#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/keep.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/tile_memory.cuh"
#include "core/floats.h"
#include "experts/cuda/ops/tiles/block_tiles.cuh"
#include "experts/portable/fragments.cuh"
#include "experts/portable/operands.cuh"
#include "experts/portable/staged_tile.cuh"

namespace anabranch::cuda::portable {

// The types and arguments of a GEMM. Scheduler: lists the tiles, constructed from Tiles (cuda/ops/tiles/), with columns
// in units of tiles. Epilogue: consumes the accumulators; all threads of the CTA call it with a StagedTile.
template <class Shape_, class Element_, Precision kPrecision_, class OperandA_, class OperandB_, class Tiles_,
          class Scheduler_, class Epilogue_>
struct Product {
  using Shape = Shape_;
  using Element = Element_;
  static constexpr Precision kPrecision = kPrecision_;
  using OperandA = OperandA_;
  using OperandB = OperandB_;
  using Tiles = Tiles_;
  using Scheduler = Scheduler_;
  using Epilogue = Epilogue_;

  OperandA a;
  OperandB b;
  Epilogue epilogue;
  Tiles tiles;
  RowMap map;                // of the tiles' rows, for GEMMs over rows
  Floats weights;            // per assignment, or none (1); passed on to the epilogue
  int32_t tile_columns = 0;  // columns of the result per tile, in the epilogue's units
};

// A GEMM over rows with an adapter: the main loop runs a second time, over u and B, and adds to the same sums.
template <class P>
struct AdaptedProduct : P {
  typename P::OperandA u;
  WeightOperand<P::OperandB::kMajor> factor;
  int32_t rank = 0;  // length of the second contraction
};
template <class P>
constexpr bool kAdapted = requires(const P& product) { product.rank; };

// The scheduler's tiles with columns in the epilogue's units.
template <class P>
class TilesInColumns {
 public:
  __device__ explicit TilesInColumns(const P& product) : scheduler_(product.tiles), columns_(product.tile_columns) {}

  __device__ Tile next(int n) {
    Tile tile = scheduler_.next(n);
    tile.column *= columns_;
    return tile;
  }

 private:
  typename P::Scheduler scheduler_;
  int32_t columns_;
};

template <class Shape>
struct alignas(256) SharedMemory {
  char stages[Shape::kStages][Shape::kBytesA + Shape::kBytesB];
  Tile tile;
  int32_t slots[Shape::kRows];  // of the tile's rows; -1: padding or no expert

  static_assert(sizeof(stages) >= kStagedBytes<Shape> + Shape::kRows * sizeof(float),
                "the epilogue reuses the memory of the stages for the staged tile and the weights of its rows");
};
// Shared memory that a CTA takes of its SM.
template <class Shape>
constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory<Shape>)) + (1 << 10);
constexpr int kMinSmSharedBytes = 100 << 10;  // smallest capacity of an SM
static_assert(2 * kSharedBytes<LargeTile> <= kMinSmSharedBytes, "two CTAs fit an SM with 100 KiB");
static_assert(kSharedBytes<SplitTile> <= kMinSmSharedBytes, "one CTA fits an SM with 100 KiB");
static_assert(2 * kSharedBytes<SmallTile> <= kMinSmSharedBytes, "two CTAs fit an SM with 100 KiB");

template <class P>
class GroupedProduct {
  using Shape = typename P::Shape;
  using Element = typename P::Element;
  using CopyA = Copy<typename P::OperandA, Element, Shape::kRows, Shape::kThreads>;
  static constexpr bool kFoursA = kByFours<P::OperandA::kMajor, sizeof(Element)>;
  static constexpr bool kFoursB = kByFours<P::OperandB::kMajor, sizeof(Element)>;
  using Staged = StagedTile<Staging<Shape, kFoursA, kFoursB>>;
  using Warp = WarpProduct<Shape, Element, P::kPrecision, P::OperandA::kMajor, P::OperandB::kMajor>;

 public:
  __device__ GroupedProduct(const P& product, SharedMemory<Shape>& shared)
      : p_(product), shared_(shared), stages_(shared_address(shared.stages)) {
    keep(stages_);
  }

  __device__ void run() {
    wait_for_previous_kernel();
    TilesInColumns<P> scheduler(p_);
    for (int n = 0; next_of_block(scheduler, n, shared_.tile); ++n) {
      float weight = 1.0f;  // of this thread's row
      if constexpr (P::OperandA::kMajor == Major::k) weight = find_slots(shared_.tile);
      Accumulators<Shape> acc = {};
      multiply(shared_.tile, acc);
      store(acc, weight);
    }
    let_next_kernel_start();
  }

 private:
  static constexpr uint32_t kStageBytes = Shape::kBytesA + Shape::kBytesB;

  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int first_row() { return warp_index() / Shape::kWarpColumns * Shape::kRowsOfWarp; }
  static __device__ int first_column() { return warp_index() % Shape::kWarpColumns * Shape::kColumnsOfWarp; }

  // Each thread looks up the assignment of one row of the tile and returns its weight.
  __device__ float find_slots(const Tile& tile) {
    static_assert(Shape::kRows <= Shape::kThreads, "one thread looks up one row");
    float weight = 0.0f;
    if (thread() < Shape::kRows) {
      const int32_t row = tile.row + thread();
      const bool is_row = tile.expert != kNoExpert && row < tile.end_row;
      const int32_t slot = is_row ? p_.map.slot_of(row) : -1;
      shared_.slots[thread()] = slot;
      if (slot >= 0) weight = p_.weights[slot];
    }
    __syncthreads();
    return weight;
  }

  __device__ __forceinline__ void multiply(const Tile& tile, Accumulators<Shape>& acc) {
    const bool has_rows = tile.row + first_row() < tile.end_row;
    if (kIsPacked<typename P::OperandB> || min(p_.a.rows.copy_bytes, p_.b.rows.copy_bytes) == kChunkBytes) {
      if (has_rows) {
        run_main_loop<true, true>(p_.a, p_.b, tile, acc);
      } else {
        run_main_loop<true, false>(p_.a, p_.b, tile, acc);
      }
    } else if constexpr (!kIsPacked<typename P::OperandB>) {
      if (has_rows) {
        run_main_loop<false, true>(p_.a, p_.b, tile, acc);
      } else {
        run_main_loop<false, false>(p_.a, p_.b, tile, acc);
      }
    }
    if constexpr (kAdapted<P>) multiply_low_rank(tile, acc);
  }

  // Adds u B to the sums. Warps without rows multiply zeros. Kernels of packed weights run without an adapter, too.
  __device__ __forceinline__ void multiply_low_rank(const Tile& tile, Accumulators<Shape>& acc) {
    if (kIsPacked<typename P::OperandB> && p_.rank == 0) return;
    __syncthreads();  // all warps have read the last k-blocks of the first loop
    Tile of_rank = tile;
    of_rank.end_k = tile.expert == kNoExpert ? 0 : p_.rank;
    if (min(p_.u.rows.copy_bytes, p_.factor.rows.copy_bytes) == kChunkBytes) {
      run_main_loop<true, true>(p_.u, p_.factor, of_rank, acc);
    } else {
      run_main_loop<false, true>(p_.u, p_.factor, of_rank, acc);
    }
  }

  // kAligned: copy both operands in 16-byte pieces. kMultiplies: false if this warp has no rows and only copies. The
  // loop has no branches, so that copies and MMAs interleave; copies past the last k-block write zeros.
  template <bool kAligned, bool kMultiplies, class OperandB>
  __device__ __forceinline__ void run_main_loop(const typename P::OperandA& a, const OperandB& b, const Tile& tile,
                                                Accumulators<Shape>& acc) {
    using CopyB = Copy<OperandB, Element, kTileColumns, Shape::kThreads>;
    CopyA copy_a(a, tile, shared_.slots);
    CopyB copy_b(b, tile, shared_.slots);
    Warp warp(first_row(), first_column());
    const int blocks = (tile.end_k - tile.k + kDepth<Element> - 1) / kDepth<Element>;
    int32_t k = tile.k;
    uint32_t filled = stages_;
    uint32_t used = stages_;
    uint32_t last = stages_ + (Shape::kStages - 1) * kStageBytes;
    keep(last);
    const auto after = [&](uint32_t stage) {
      return stage == last ? stage - (Shape::kStages - 1) * kStageBytes : stage + kStageBytes;
    };
    const auto copy = [&] {
      const uint32_t stage = filled;
      filled = after(stage);
      if constexpr (kAligned) {
        copy_a.template copy<kChunkBytes>(stage, k);
        copy_b.template copy<kChunkBytes>(stage + Shape::kBytesA, k);
      } else {
        copy_in_pieces(copy_a, a.rows.copy_bytes, stage, k);
        copy_in_pieces(copy_b, b.rows.copy_bytes, stage + Shape::kBytesA, k);
      }
      k += kDepth<Element>;
      end_copy_group();
    };
#pragma unroll 1
    for (int ahead = 0; ahead < Shape::kStages - 1; ++ahead) copy();
    const auto begin_block = [&] {
      wait_for_copies<Shape::kStages - 2>();
      if constexpr (kIsPacked<OperandB>) copy_b.decode(used + Shape::kBytesA);
      __syncthreads();  // the k-block has arrived for all warps, and all have read the one before
      if constexpr (kMultiplies) warp.load(used, used + Shape::kBytesA);
    };
    begin_block();
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      copy();  // the k-block kStages - 1 ahead
      const auto advance = [&] {
        used = after(used);
        begin_block();
      };
      if constexpr (kMultiplies) {
        warp.add(used, used + Shape::kBytesA, acc, advance);
      } else {
        advance();
      }
    }
    if constexpr (kMultiplies) warp.finish(acc);
    wait_for_copies<0>();  // drain the copies past the last k-block: the next tile counts copy groups from zero
  }

  template <class CopyOfOne>
  static __device__ __forceinline__ void copy_in_pieces(CopyOfOne& copy, int bytes, uint32_t to, int32_t k) {
    with_bytes<Element>(bytes, [&]<int kBytes>() { copy.template copy<kBytes>(to, k); });
  }

  // Reads the tile from shared memory again, because the accumulators occupy the registers.
  __device__ __forceinline__ void store(const Accumulators<Shape>& acc, float weight) {
#pragma unroll 1  // keep a single copy of the epilogue's code
    for (int part = 0; part < Shape::kFragmentsDown; ++part) {
      const Staged staged{shared_.tile, stages_, part, shared_.slots, stages_ + kStagedBytes<Shape>};
      __syncthreads();
      if (part == 0 && thread() < Shape::kRows) store_shared(staged.weight_place(thread()), weight);
#pragma unroll
      for (int i = 0; i < Shape::kFragmentsDown; ++i) {
        if (i == part) stage(acc[i]);
      }
      __syncthreads();
      p_.epilogue(staged);
    }
  }

  // Writes one fragment row (16 rows) of the warp to shared memory.
  __device__ __forceinline__ void stage(const float (&acc)[Shape::kFragmentsAcross][4]) const {
    using Places = Staging<Shape, kFoursA, kFoursB>;
    const int first_row = warp_index() / Shape::kWarpColumns * kFragmentRows;
#pragma unroll
    for (int j = 0; j < Shape::kFragmentsAcross; j += kFoursB ? 4 : 1) {
#pragma unroll
      for (int i = 0; i < 4; i += kFoursB ? 1 : 2) {
        const int row = first_row + row_of_c(lane_index(), i);
        const int column = first_column() + side_at<kFoursB>(j, column_of_c(lane_index(), i));
        if constexpr (kFoursB) {
          store_shared(stages_ + Places::place(row, column),
                       float4{acc[j][i], acc[j + 1][i], acc[j + 2][i], acc[j + 3][i]});
        } else {
          store_shared(stages_ + Places::place(row, column), acc[j][i], acc[j][i + 1]);
        }
      }
    }
  }

  const P& p_;
  SharedMemory<Shape>& shared_;
  uint32_t stages_;
};

template <class P>
__global__ void __launch_bounds__(P::Shape::kThreads, P::Shape::kBlocks)
    grouped_gemm_mma(const __grid_constant__ P product) {
  GroupedProduct<P>(product, dynamic_shared_memory<SharedMemory<typename P::Shape>>()).run();
}

}  // namespace anabranch::cuda::portable
