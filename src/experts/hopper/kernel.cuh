// The grouped product: a persistent block a multiprocessor; one producer warpgroup that schedules tiles and loads, two
// consumer warpgroups that multiply and run the epilogue.
//
//   warpgroup 0, warp 0   starts the loads of the copy engine (TMA)
//                warp 1   runs the tile scheduler and puts the block's tiles into the queue
//                (all)    if an operand is gathered, copies it
//   warpgroups 1, 2       take tiles from the queue (both the same one, or in turn: Schedule), multiply, store
#pragma once

#include "core/cuda/launch.h"
#include "core/cuda/registers.cuh"
#include "experts/hopper/late_subtiles.cuh"
#include "experts/hopper/mainloop.cuh"
#include "experts/hopper/scaled_mainloop.cuh"
#include "experts/hopper/subtile_writer.cuh"
#include "experts/hopper/tile_queue.cuh"

namespace anabranch::cuda::hopper {

// What a product is made of. Scheduler: which tiles there are, made of Tiles (cuda/tiles/). Epilogue: what becomes of
// the accumulators. Each warp has 16 rows of every panel and calls
//   begin_prefetch(writer, tile, row)                 once a tile, before it multiplies, with its row of the first
//                                                     panel: starts to read what write() will need
//   finish_prefetch(prefetched)                       while its last products run, if its warpgroup has rows: to read
//                                                     what begin_prefetch() has found the place of
//   write(writer, tile, row, panel, acc, prefetched)  panel after panel, with what begin_prefetch() gave
//   write_zeros(writer, tile, row)                    instead, for a tile without k-blocks
// If it has 16-bit results and kKeeps, it may instead of write() be told to
//   keep(late, tile, row, acc)                        them (LateSubtiles), and while products of the next tile run
//   write_kept(writer, tile, row, column, words)      a subtile after the other, or nothing where there is no column
template <class Shape_, class Element_, class OperandA_, class OperandB_, class Tiles_, class Scheduler_,
          class Epilogue_>
struct Product {
  using Shape = Shape_;
  using Element = Element_;
  using OperandA = OperandA_;
  using OperandB = OperandB_;
  using Tiles = Tiles_;
  using Scheduler = Scheduler_;
  using Epilogue = Epilogue_;

  OperandA a;
  OperandB b;
  Epilogue epilogue;
  Tiles tiles;
};

template <class Shape>
struct alignas(1024) SharedMemory {
  OperandRing<Shape> ring;
  alignas(1024) char subtiles[Shape::kConsumers * 4][kSubtileBuffers * kSubtileBytes];
  TileQueue queue;
  LatePlace late[Shape::kConsumers * 4];
  int32_t positions[Shape::kConsumers * 4];  // among the tiles, of consumer warps that have no register for it
};

template <class P>
class GroupedProduct {
  using Shape = typename P::Shape;
  using OperandA = typename P::OperandA;
  using OperandB = typename P::OperandB;
  static constexpr bool kGathers = OperandA::kGathered || OperandB::kGathered;
  static constexpr int kGatherers = kGathers ? 4 : 0;  // warps
  // Tiles in turn hide what they store anyway, and sums of scaled products leave no registers.
  static constexpr bool kKeeps = P::Epilogue::kKeeps && Shape::kTilesInFlight == 1 && !OperandA::kScaled;

 public:
  __device__ GroupedProduct(const P& product, SharedMemory<Shape>& shared) : p_(product), shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      shared_.ring.init(kGatherers * kWarp);
      shared_.queue.init(Shape::kTileWarps + (kGathers ? kGatherers - 1 : 1));
      fence_barrier_init();
      p_.a.prefetch_maps();
      p_.b.prefetch_maps();
      p_.epilogue.prefetch_maps();
    }
    sync_cluster<Shape::kBlocks>();
    wait_for_previous_kernel();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_up_registers<kProducerRegisters>();
      if (warp_index() == 1) {
        schedule_tiles();
      } else if (warp_index() == 0 || kGathers) {
        load_tiles(warp_index() == 0);
      }
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
    if (Shape::kBlocks > 1) sync_cluster<Shape::kBlocks>();  // others may still arrive at this block's barriers
  }

 private:
  // Of a thread. At the start each has 65536 / kThreads of them, rounded down to a multiple of 8. Gathering takes more.
  static constexpr bool kProducerTakesMore = kGathers && !P::Epilogue::template kTakesRegisters<Shape>;
  static constexpr int kProducerRegisters = OperandA::kScaled || kProducerTakesMore ? 56 : 40;
  static constexpr int kConsumerRegisters = OperandA::kScaled || kProducerTakesMore ? 224 : 232;
  static_assert(kProducerRegisters + Shape::kConsumers * kConsumerRegisters <= 65536 / Shape::kThreads / 8 * 8 * 3,
                "more registers than a multiprocessor has");

  __device__ void schedule_tiles() {
    typename P::Scheduler scheduler(p_.tiles);
    int32_t k_blocks = 0;
    int n = 0;
    for (;; ++n) {
      Tile tile = scheduler.next(n);
      tile.first_k_block = k_blocks;
      shared_.queue.put(n, tile);
      if (tile.expert == kNoTile) break;
      k_blocks += blocks_of(p_.b, tile);
      if constexpr (kGathers) load_k_blocks(shared_.ring, p_.a, p_.b, tile, false);
    }
    for (int more = 1; more < Shape::kTilesInFlight; ++more) shared_.queue.put(n + more, {.expert = kNoTile});
    let_next_kernel_start();
  }

  // leads: the warp starts the loads of the copy engine.
  __device__ void load_tiles(bool leads) {
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) return;
      load_k_blocks(shared_.ring, p_.a, p_.b, tile, leads);
    }
  }

  __device__ void consume(int warpgroup) {
    const int first_tile = Shape::kTilesInFlight == 1 ? 0 : warpgroup;
    SubtileWriter writer(shared_.subtiles[consumer_warp_anew()]);
    constexpr bool kInRegister = !P::Epilogue::kTakesPosition && !OperandA::kScaled;
    int position = first_tile;
    LateSubtiles<kKeeps ? Shape::kColumns / kKeptColumns : 0> late;
    const auto write_next = [&] {
      if constexpr (kKeeps) {
        late.template write_next<kKeptColumns>(p_.epilogue, writer, shared_.late[consumer_warp_anew()]);
      }
    };
    const auto write_rest = [&] {
      while (late.are_left()) write_next();
    };
    if (!kInRegister) {
      position_in_memory() = first_tile;
      __syncwarp();
    }
    for (;;) {
      int n = position;
      if constexpr (!kInRegister) n = position_in_memory();
      Tile tile = OperandA::kScaled ? shared_.queue.peek(n) : shared_.queue.get(n);
      if (tile.expert == kNoTile) break;
      const int thread = thread_index_anew();
      const int member = Shape::kTilesInFlight == 1 ? thread / kWarpgroup - 1 : 0;
      int first_row = member * Shape::kWarpgroupRows + thread / kWarp % 4 * kSubtileRows;
      float acc[Shape::kWarpgroupPanels][Shape::kColumns / 2];
      auto prefetched = p_.epilogue.template begin_prefetch<Shape>(writer, tile, first_row);
      shared_.ring.begin_mainloop(n);
      if (tile.k_blocks > 0) {
        multiply(n, tile, member, acc, write_next, [&] {
          p_.epilogue.template finish_prefetch<Shape>(prefetched);
          write_rest();
        });
      } else {
        shared_.ring.end_mainloop(n);
      }
      if constexpr (OperandA::kScaled) {
        // Found anew rather than kept: accumulators of two kinds leave no registers.
        tile = shared_.queue.get(position_in_memory());
        first_row = consumer_warp_anew() * kSubtileRows;
        writer = SubtileWriter::anew(shared_.subtiles[consumer_warp_anew()]);
      }
#pragma unroll
      for (int panel = 0; panel < Shape::kWarpgroupPanels; ++panel) {
        const int row = first_row + panel * kPanel;
        if (tile.k_blocks > 0) {
          if constexpr (!kKeeps) {
            p_.epilogue.template write<Shape>(writer, tile, row, panel, acc[panel], prefetched);
          } else if (tile.row + row < tile.end_row) {
            late.begin(tile, row, shared_.late[consumer_warp_anew()]);
            p_.epilogue.keep(late, tile, row, acc[panel]);
          }
        } else {
          p_.epilogue.template write_zeros<Shape>(writer, tile, row);
        }
      }
      if constexpr (kInRegister) {
        position += Shape::kTilesInFlight;
      } else {
        const int done = position_in_memory();
        __syncwarp();
        if (lane_index() == 0) position_in_memory() = done + Shape::kTilesInFlight;
        __syncwarp();
      }
    }
    write_rest();
    writer.finish();
  }

  // Which threadIdx.x would be kept in a register for: accumulators take them all.
  static __device__ int thread_index_anew() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }

  static constexpr int kKeptColumns = kSubtileColumns<typename P::Element>;
  static __device__ int consumer_warp_anew() { return thread_index_anew() / kWarp - kWarpgroup / kWarp; }
  __device__ volatile int32_t& position_in_memory() { return shared_.positions[consumer_warp_anew()]; }

  // Only panels that have rows of the expert.
  template <class During, class DuringLast>
  __device__ __forceinline__ void multiply(int n, const Tile& tile, int member,
                                           float (&acc)[Shape::kWarpgroupPanels][Shape::kColumns / 2],
                                           const During& during_products, const DuringLast& during_last_products) {
    using Element = typename P::Element;
    const int rows = tile.end_row - tile.row - member * Shape::kWarpgroupRows;
    if (Shape::kTileWarpgroups > 1 && rows <= 0) {
      skip_k_blocks(shared_.ring, tile, blocks_of(p_.b, tile));
    } else if constexpr (OperandA::kScaled) {
      multiply_scaled_k_blocks(shared_.ring, p_.a, p_.b, tile, member, acc[0]);
      during_last_products();
    } else if (Shape::kWarpgroupPanels == 1 || rows <= kPanel) {
      multiply_k_blocks<1, Element, OperandA>(shared_.ring, p_.b, n, tile, member, acc, during_products,
                                              during_last_products);
    } else {
      multiply_k_blocks<Shape::kWarpgroupPanels, Element, OperandA>(shared_.ring, p_.b, n, tile, member, acc,
                                                                    during_products, during_last_products);
    }
  }

  const P& p_;
  SharedMemory<Shape>& shared_;
};

template <class P>
__global__ void __launch_bounds__(P::Shape::kThreads, 1) grouped_product(const __grid_constant__ P product) {
  extern __shared__ __align__(1024) char memory[];
  GroupedProduct<P>(product, *reinterpret_cast<SharedMemory<typename P::Shape>*>(memory)).run();
}

}  // namespace anabranch::cuda::hopper
