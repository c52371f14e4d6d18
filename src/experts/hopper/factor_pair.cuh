// Both GEMMs of a FactorPair in one kernel. A k-block is 64 rows m by 256 columns: k for the gradient, the rows of y
// for the thin GEMM, whose sum over these columns is one part of y.
//
//   producer   warp 0    issues TMA loads: k-blocks, and once per tile the factor's part that belongs to its columns
//              warp 1    runs the tile scheduler, fills the tile queue
//   consumers  first     sums the gradient over the k-blocks of a tile, then stores it
//              second    multiplies every k-block by the part of the factor, and stores a part of y
//
// A tile is 256 columns of m, for one segment of rows, and all of the rank.
#pragma once

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/registers.cuh"
#include "experts/cuda/ops/factor_pair.h"
#include "experts/cuda/ops/tiles/segment_tile_scheduler.cuh"
#include "experts/hopper/rows_product.cuh"
#include "experts/hopper/tile_queue.cuh"
#include "experts/hopper/weight_gradient.cuh"

namespace anabranch::cuda::hopper {

// The rows m are gradient.x, with a gradient [C, rank], or gradient.d_y, with a gradient [rank, C].
template <Paired kPaired>
struct PairShape {
  static constexpr int kStages = 3;
  static constexpr int kWide = kPairColumns;                           // columns of m per tile
  static constexpr int kRows = kPaired == Paired::x ? kWide : kPanel;  // of a tile of the gradient
  static constexpr int kColumns = kPaired == Paired::x ? kPanel : kWide;
  static constexpr int kPanels = kRows / kPanel;
  static constexpr int kWidePanels = kWide / kPanel;
  static constexpr int kWideBytes = kWidePanels * kPanelBytes;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr Side kWideSide = kPaired == Paired::x ? Side::rows : Side::columns;
};

// One panel of a factor: the rank, and 64 columns of m.
struct FactorPanel {
  static constexpr int kColumns = kPanel;
  static constexpr int kBlocks = 1;
};

template <Paired kPaired, class Element_, Major kMajorFactor_>
struct FactorPairProduct {
  using Shape = PairShape<kPaired>;
  using Element = Element_;
  static constexpr Major kMajorFactor = kMajorFactor_;
  using Scheduler = SegmentTileScheduler<Shape::kRows, Shape::kColumns>;

  RowsAsK<Side::rows> a;     // gradient.x
  RowsAsK<Side::columns> b;  // gradient.d_y
  WeightOperand<kMajorFactor> factor;
  WeightGradientEpilogue<Element> epilogue;
  SegmentTiles tiles;
  float* parts;  // [pair_parts(C), R, rank]
  int64_t R;
  int32_t rank;
};

template <class Shape>
struct alignas(1024) PairMemory {
  char wide[Shape::kStages][Shape::kWideBytes];
  char narrow[Shape::kStages][kPanelBytes];
  char factor[2][Shape::kWideBytes];
  char subtiles[4][2][kSubtileBytes];
  TileQueue queue;
  Barrier full[Shape::kStages];
  Barrier empty[Shape::kStages];
  Barrier factor_full[2];
  Barrier factor_empty[2];
};

template <class P>
class FactorPairKernel {
  using Shape = typename P::Shape;
  using Element = typename P::Element;
  using Position = RingPosition<Shape::kStages>;
  static constexpr int kSteps = kBlockK / kWgmmaK;
  static constexpr Descriptor kNextWide = Shape::kWidePanels * kNextPanel;  // the next stage

 public:
  __device__ FactorPairKernel(const P& product, PairMemory<Shape>& shared) : p_(product), shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shape::kStages; ++i) {
        shared_.full[i].init(1);
        shared_.empty[i].init(8);  // warps of both consumers
      }
      for (int i = 0; i < 2; ++i) {
        shared_.factor_full[i].init(1);
        shared_.factor_empty[i].init(4);
      }
      shared_.queue.init(9);  // the consumers' warps and the producer's
      fence_barrier_init();
      p_.a.prefetch_maps();
      p_.b.prefetch_maps();
      p_.factor.prefetch_maps();
      p_.epilogue.prefetch_maps();
    }
    __syncthreads();
    wait_for_previous_kernel();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_up_registers<40>();
      if (warp_index() == 0) load_tiles();
      if (warp_index() == 1) schedule_tiles();
    } else {
      take_registers<232>();
      if (warpgroup == 1) {
        sum_gradients();
      } else {
        multiply_rows();
      }
    }
  }

 private:
  __device__ void schedule_tiles() {
    typename P::Scheduler scheduler(p_.tiles);
    for (int n = 0;; ++n) {
      const Tile tile = scheduler.next(n);
      shared_.queue.put(n, tile);
      if (tile.expert == kNoTile) break;
    }
    let_next_kernel_start();
  }

  __device__ void load_tiles() {
    constexpr uint32_t kBytes = Shape::kWideBytes + kPanelBytes;
    Position at;
    RingPosition<2> factor_at;
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) return;
      if (tile.k_blocks == 0) continue;
      shared_.factor_empty[factor_at.stage].wait(factor_at.phase ^ 1u);
      __syncwarp();
      if (lane_index() == 0) load_factor(tile, factor_at.stage);
      factor_at.advance();
#pragma unroll 1
      for (int k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
        shared_.empty[at.stage].wait(at.phase ^ 1u);
        __syncwarp();  // no lane may lag a phase behind
        if (lane_index() != 0) continue;
        Barrier& full = shared_.full[at.stage];
        full.arrive_and_expect(kBytes);
        const uint32_t wide = shared_address(shared_.wide[at.stage]);
        const uint32_t narrow = shared_address(shared_.narrow[at.stage]);
        p_.a.template load<Shape::kRows>(kIsX ? wide : narrow, full, tile, k_block, Multicast<1>{});
        p_.b.template load<Shape::kColumns>(kIsX ? narrow : wide, full, tile, k_block, Multicast<1>{});
      }
    }
  }

  __device__ void load_factor(const Tile& tile, int stage) {
    Barrier& full = shared_.factor_full[stage];
    full.arrive_and_expect(Shape::kWideBytes);
    const Tile from{.expert = tile.expert, .k = first_of<Shape::kWideSide>(tile)};
#pragma unroll 1
    for (int panel = 0; panel < Shape::kWidePanels; ++panel) {
      p_.factor.template load<kPanel>(shared_address(shared_.factor[stage]) + panel * kPanelBytes, full, from, panel,
                                      Multicast<1>{});
    }
  }

  // gradient = x^T d_y
  __device__ void sum_gradients() {
    using Multiply = Wgmma<Shape::kColumns, Major::mn, Major::mn, Element>;
    const int warp = warp_index() % 4;
    SubtileWriter writer(shared_.subtiles[warp]);
    const Descriptor first_wide = make_descriptor(shared_address(shared_.wide[0]));
    const Descriptor first_narrow = make_descriptor(shared_address(shared_.narrow[0]));
    Position at;
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) break;
      float acc[Shape::kPanels][Shape::kColumns / 2];
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) begin_accumulators(acc[panel]);
      Position before = at;
      for (int block = 0; block < tile.k_blocks; ++block) {
        shared_.full[at.stage].wait(at.phase);
        const Descriptor wide = first_wide + at.stage * kNextWide;
        const Descriptor narrow = first_narrow + at.stage * kNextPanel;
        fence_accumulators();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int panel = 0; panel < Shape::kPanels; ++panel) {
            Multiply::begin(acc[panel], (kIsX ? wide : narrow) + panel * kNextPanel + k * kNextK<Major::mn>,
                            (kIsX ? narrow : wide) + k * kNextK<Major::mn>, k == 0 ? block : 1);
          }
        }
        commit_products();
        wait_for_products<1>();  // the previous k-block is done
        if (block > 0) release(before);
        before = at;
        at.advance();
      }
      wait_for_products<0>();
      if (tile.k_blocks > 0) release(before);
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        finish_accumulators(acc[panel]);
        const int row = warp * kSubtileRows + panel * kPanel;
        if (tile.k_blocks > 0) {
          p_.epilogue.template write<Shape>(writer, tile, row, panel, acc[panel], EmptyPrefetch{});
        } else {
          p_.epilogue.template write_zeros<Shape>(writer, tile, row);
        }
      }
    }
    writer.finish();
  }

  // part of y = m op(f)
  __device__ void multiply_rows() {
    using Multiply = Wgmma<kPanel, Major::k, P::kMajorFactor, Element>;
    const Descriptor first_wide = make_descriptor(shared_address(shared_.wide[0]));
    const Descriptor first_factor = make_descriptor(shared_address(shared_.factor[0]));
    Position at;
    RingPosition<2> factor_at;
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) return;
      if (tile.k_blocks == 0) continue;
      shared_.factor_full[factor_at.stage].wait(factor_at.phase);
      const Descriptor factor = first_factor + factor_at.stage * kNextWide;
#pragma unroll 1
      for (int block = 0; block < tile.k_blocks; ++block, at.advance()) {
        shared_.full[at.stage].wait(at.phase);
        const Descriptor rows = first_wide + at.stage * kNextWide;
        float acc[kPanel / 2];
        begin_accumulators(acc);
        fence_accumulators();
#pragma unroll
        for (int panel = 0; panel < Shape::kWidePanels; ++panel) {
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            Multiply::begin(acc, rows + panel * kNextPanel + k * kNextK<Major::k>,
                            factor + panel * kNextPanel + k * kNextK<P::kMajorFactor>, panel + k);
          }
        }
        commit_products();
        wait_for_products<0>();
        finish_accumulators(acc);
        release(at);
        store_part(tile, tile.k + block * kBlockK, acc);
      }
      __syncwarp();
      if (lane_index() == 0) shared_.factor_empty[factor_at.stage].arrive();
      factor_at.advance();
    }
  }

  // first_row: of the k-block.
  __device__ void store_part(const Tile& tile, int32_t first_row, const float (&acc)[kPanel / 2]) {
    const int64_t part = first_of<Shape::kWideSide>(tile) / Shape::kWide;
    const int32_t row = first_row + warp_index() % 4 * kSubtileRows + lane_index() / 4;
    float* const to = p_.parts + (part * p_.R + row) * p_.rank + lane_index() % 4 * 2;
#pragma unroll
    for (int column = 0; column < kPanel; column += 8) {
      if (column >= p_.rank) return;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        if (row + 8 * below >= tile.end_k) continue;
        const float* const pair = acc + column / 2 + 2 * below;
        *reinterpret_cast<float2*>(to + int64_t{8} * below * p_.rank + column) = {pair[0], pair[1]};
      }
    }
  }

  __device__ void release(const Position& at) {
    if (lane_index() == 0) shared_.empty[at.stage].arrive();
  }

  static constexpr bool kIsX = Shape::kWideSide == Side::rows;

  const P& p_;
  PairMemory<Shape>& shared_;
};

template <class P>
__global__ void __launch_bounds__(P::Shape::kThreads, 1) factor_pair(const __grid_constant__ P product) {
  extern __shared__ __align__(1024) char memory[];
  FactorPairKernel<P>(product, *reinterpret_cast<PairMemory<typename P::Shape>*>(memory)).run();
}

template <Paired kPaired, class Element, Major kMajorFactor>
ab_status launch_factor_pair(const FactorPair& pair, const SegmentBounds& bounds, const SegmentList& list,
                             int multiprocessors, cudaStream_t stream) {
  using P = FactorPairProduct<kPaired, Element, kMajorFactor>;
  using Shape = typename P::Shape;
  static_assert(sizeof(PairMemory<Shape>) <= 227 << 10, "a CTA has at most 227 KiB of shared memory");
  const WeightGradient& g = pair.gradient;
  P product;
  AB_RETURN_IF_ERROR(prepare_operand("x", g.x, g.map, g.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_operand("d_y", g.d_y, g.map, g.N, &product.b));
  AB_RETURN_IF_ERROR(
      (prepare_weights<FactorPanel, kMajorFactor>(pair.rows, pair.rows.w, g.E, pair.rows.D, &product.factor)));
  AB_RETURN_IF_ERROR(prepare_epilogue(g, bounds, list, &product.epilogue));
  const auto row_tiles = static_cast<int32_t>(ceil_div(g.D, Shape::kRows));
  const auto column_tiles = static_cast<int32_t>(ceil_div(g.N, Shape::kColumns));
  product.tiles = {list, static_cast<int32_t>(g.D), row_tiles, column_tiles};
  product.parts = pair.parts;
  product.R = g.R;
  product.rank = static_cast<int32_t>(pair.rows.N);
  const int64_t tiles = bounds.segments * row_tiles * column_tiles;
  return launch("thin grouped GEMM and weight gradient", factor_pair<P>,
                {std::min<int64_t>(tiles, multiprocessors), Shape::kThreads, sizeof(PairMemory<Shape>), stream, true},
                product);
}

template <Paired kPaired, Major kMajorFactor>
ab_status launch_factor_pair(const FactorPair& pair, const SegmentBounds& bounds, const SegmentList& list,
                             int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    return launch_factor_pair<kPaired, Element, kMajorFactor>(pair, bounds, list, multiprocessors, stream);
  };
  return pair.rows.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
