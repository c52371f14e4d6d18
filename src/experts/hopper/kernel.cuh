// Grouped GEMM for Hopper. One persistent CTA per SM: 1 producer warpgroup, or 2 if the second one decodes packed
// weights, and 2 consumer warpgroups. With packed weights and few rows there are two CTAs per SM, with 1 consumer
// warpgroup each.
//
//   producer   warp 0       issues TMA loads
//              warp 1       runs the tile scheduler, fills the tile queue
//              all 4 warps  copy gathered rows (cp.async), if an operand is gathered
//              all 4 warps  decode packed weights, see Loads
//   consumers               take tiles from the queue, issue wgmma, run the epilogue
//                           cooperative: both work on one tile; ping-pong: one tile each, alternating
#pragma once

#include "core/cuda/launch.h"
#include "core/cuda/registers.cuh"
#include "experts/hopper/late_subtiles.cuh"
#include "experts/hopper/mainloop.cuh"
#include "experts/hopper/scaled_mainloop.cuh"
#include "experts/hopper/subtile_writer.cuh"
#include "experts/hopper/tile_queue.cuh"

namespace anabranch::cuda::hopper {

// The types and arguments of a GEMM. Scheduler: lists the tiles, constructed from Tiles (cuda/ops/tiles/). Epilogue:
// consumes the accumulators. Each warp owns 16 rows of every panel and calls
//   begin_prefetch(writer, tile, row)                 once per tile, before the main loop, with the warp's row in the
//                                                     first panel: starts to read what write() will need
//   finish_prefetch(prefetched)                       during the last MMAs, if the warpgroup has rows: reads
//                                                     what depends on the loads of begin_prefetch()
//   write(writer, tile, row, panel, acc, prefetched)  once per panel, with the result of begin_prefetch()
//   write_zeros(writer, tile, row)                    instead of write(), for tiles without k-blocks
// Epilogues with 16-bit results and kDefersStores support deferred stores. Instead of write(), the warp calls
//   defer(late, tile, row, acc)                       to pack the results (LateSubtiles)
//   write_deferred(writer, tile, row, column, words)  once per subtile during the next tile's main loop;
//                                                     ignores columns out of bounds
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
  alignas(1024) char subtiles[Shape::kConsumers * 4][Shape::kSubtileBuffers][kSubtileBytes];
  TileQueue queue;
  LatePlace late[Shape::kConsumers * 4];
  int32_t positions[Shape::kConsumers * 4];  // the tile index of each consumer warp that has no register for it
  int32_t k_blocks;                          // see schedule_tiles()
};

template <class P>
class GroupedProduct {
  using Shape = typename P::Shape;
  using OperandA = typename P::OperandA;
  using OperandB = typename P::OperandB;
  static_assert(Shape::kProducers == 1 || OperandB::kPacked, "the second producer warpgroup decodes");
  static_assert(Shape::kProducers >= Shape::kBlocks || !OperandB::kPacked, "see Loads");
  static_assert(Shape::kSubtileBuffers == 2 || P::Epilogue::kWritesFromOneBuffer, "see SubtileWriter");
  static constexpr bool kFirstCopies = kCopies<Loads::both, OperandA, OperandB>;
  static constexpr int kFirstArrivals = kArrivals<Loads::both, OperandA, OperandB>;
  static constexpr int kSecondArrivals = Shape::kProducers > 1 ? kArrivals<Loads::b, OperandA, OperandB> : 0;
  // The scheduler's warp does not read the queue. It takes part if all four warps do.
  static constexpr int kReadingWarps = (kFirstArrivals > 0 ? 3 : 1) + (Shape::kProducers - 1) * 4;
  // Ping-pong already overlaps stores with MMA, and the FP8 main loop has no registers left for deferred stores.
  static constexpr bool kDefersStores =
      P::Epilogue::kDefersStores && Shape::kTilesInFlight == 1 && Shape::kWarpgroupPanels == 1 && !OperandA::kScaled;

 public:
  __device__ GroupedProduct(const P& product, SharedMemory<Shape>& shared) : p_(product), shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      shared_.ring.init(kFirstArrivals + kSecondArrivals);
      shared_.queue.init(Shape::kTileWarps + kReadingWarps);
      fence_barrier_init();
      p_.a.prefetch_maps();
      p_.b.prefetch_maps();
      p_.epilogue.prefetch_maps();
    }
    sync_cluster<Shape::kBlocks>();
    wait_for_previous_kernel();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (Shape::kProducers > 1 && warpgroup == 1) {
      give_up_registers<kSecondProducerRegisters>();
      load_tiles([&](const Tile& tile) { load_k_blocks<Loads::b>(shared_.ring, p_.a, p_.b, tile, false); });
    } else if (warpgroup == 0) {
      give_up_registers<kProducerRegisters>();
      if (warp_index() == 1) {
        schedule_tiles();
      } else if (warp_index() == 0 || kFirstArrivals > 0) {
        load_tiles([&](const Tile& tile) { load_first(tile, warp_index() == 0); });
      }
    } else {
      take_registers<kConsumerRegisters>();
      consume(warpgroup - Shape::kProducers);
    }
    if (Shape::kBlocks > 1) sync_cluster<Shape::kBlocks>();  // other CTAs may still use this CTA's barriers and stages
  }

 private:
  // Registers per thread after setmaxnreg. Every thread starts with 65536 / kThreads, rounded down to a multiple of 8.
  // Producer warpgroups get:
  //
  //   two                           56 and 40
  //   one that gathers and decodes  72
  //   one for FP8                   56
  //   one that gathers              56, or 40 if the epilogue needs the registers
  //   others                        40
  static constexpr bool kLargeProducer =
      Shape::kProducers == 2 || OperandA::kScaled || (kFirstCopies && !P::Epilogue::template kNeedsRegisters<Shape>);
  static constexpr int kProducerRegisters = Shape::kProducers == 1 && OperandB::kPacked ? 72 : kLargeProducer ? 56 : 40;
  static constexpr int kSecondProducerRegisters = 40;  // if there is one
  static constexpr int kRegisters =
      65536 / Shape::kCtasPerSm / Shape::kThreads / 8 * 8 * (Shape::kProducers + Shape::kConsumers);
  static constexpr int kConsumerRegisters =
      (kRegisters - kProducerRegisters - (Shape::kProducers == 2 ? kSecondProducerRegisters : 0)) / Shape::kConsumers /
      8 * 8;

  __device__ void schedule_tiles() {
    typename P::Scheduler scheduler(p_.tiles);
    int32_t k_blocks = 0;                             // of the tiles so far
    constexpr bool kInRegister = !OperandB::kPacked;  // a warp that decodes has none left
    volatile int32_t& k_blocks_in_memory = shared_.k_blocks;
    if (!kInRegister && lane_index() == 0) k_blocks_in_memory = 0;
    int n = 0;
    for (;; ++n) {
      Tile tile = scheduler.next(n);
      if constexpr (!kInRegister) {
        __syncwarp();
        k_blocks = k_blocks_in_memory;
      }
      tile.first_k_block = k_blocks;
      shared_.queue.put(n, tile);
      if (tile.expert == kNoTile) break;
      k_blocks += blocks_of(p_.b, tile);
      if (!kInRegister && lane_index() == 0) k_blocks_in_memory = k_blocks;
      if constexpr (kFirstArrivals > 0) load_first(tile, false);
    }
    for (int more = 1; more < Shape::kTilesInFlight; ++more) shared_.queue.put(n + more, {.expert = kNoTile});
    let_next_kernel_start();
  }

  template <class Load>
  __device__ void load_tiles(const Load& load) {
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) return;
      load(tile);
    }
  }

  // Loads a tile as a warp of the first producer warpgroup. is_leader: this warp issues the TMA loads.
  __device__ void load_first(const Tile& tile, bool is_leader) {
    if constexpr (Shape::kProducers > 1 && Shape::kBlocks > 1) {
      if (tile.multicasts_b != 0) return load_k_blocks<Loads::a>(shared_.ring, p_.a, p_.b, tile, is_leader);
    }
    load_k_blocks<Loads::both>(shared_.ring, p_.a, p_.b, tile, is_leader);
  }

  __device__ void consume(int warpgroup) {
    const int first_tile = Shape::kTilesInFlight == 1 ? 0 : warpgroup;
    SubtileWriter writer(shared_.subtiles[reload_consumer_warp()]);
    // A decoding producer leaves no register for the tile index, either.
    constexpr bool kInRegister = !P::Epilogue::kNeedsPositionRegister && !OperandA::kScaled && !OperandB::kPacked;
    int position = first_tile;
    LateSubtiles<kDefersStores ? Shape::kColumns / kDeferredColumns : 0> late;
    const auto write_next = [&] {
      if constexpr (kDefersStores) {
        late.template write_next<kDeferredColumns>(p_.epilogue, writer, shared_.late[reload_consumer_warp()]);
      }
    };
    const auto write_remaining = [&] {
      while (late.any_left()) write_next();
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
      const int thread = reload_thread_index();
      const int member = Shape::kTilesInFlight == 1 ? thread / kWarpgroup - Shape::kProducers : 0;
      int first_row = member * Shape::kWarpgroupRows + thread / kWarp % 4 * kSubtileRows;
      float acc[Shape::kWarpgroupPanels][Shape::kColumns / 2];
      auto prefetched = p_.epilogue.template begin_prefetch<Shape>(writer, tile, first_row);
      shared_.ring.begin_mainloop(n);
      if (tile.k_blocks > 0) {
        multiply(n, tile, member, acc, write_next, [&] {
          p_.epilogue.template finish_prefetch<Shape>(prefetched);
          write_remaining();
        });
      } else {
        shared_.ring.end_mainloop(n);
      }
      if constexpr (OperandA::kScaled) {
        // Read the tile again: two sets of accumulators leave no registers to hold it.
        tile = shared_.queue.get(position_in_memory());
        first_row = reload_consumer_warp() * kSubtileRows;
        writer = SubtileWriter::reopen(shared_.subtiles[reload_consumer_warp()]);
      }
#pragma unroll
      for (int panel = 0; panel < Shape::kWarpgroupPanels; ++panel) {
        const int row = first_row + panel * kPanel;
        if (tile.k_blocks > 0) {
          if constexpr (!kDefersStores) {
            p_.epilogue.template write<Shape>(writer, tile, row, panel, acc[panel], prefetched);
          } else if (tile.row + row < tile.end_row) {
            late.begin(tile, row, shared_.late[reload_consumer_warp()]);
            p_.epilogue.defer(late, tile, row, acc[panel]);
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
    write_remaining();
    writer.finish();
  }

  // Reads %tid.x again. threadIdx.x would occupy a register, and the accumulators need them all.
  static __device__ int reload_thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }

  static constexpr int kDeferredColumns = kSubtileColumns<typename P::Element>;
  static __device__ int reload_consumer_warp() { return reload_thread_index() / kWarp - Shape::kProducers * 4; }
  __device__ volatile int32_t& position_in_memory() { return shared_.positions[reload_consumer_warp()]; }

  // Multiplies only the panels that contain rows of the expert.
  template <class During, class DuringLast>
  __device__ __forceinline__ void multiply(int n, const Tile& tile, int member,
                                           float (&acc)[Shape::kWarpgroupPanels][Shape::kColumns / 2],
                                           const During& during_products, const DuringLast& during_last_products) {
    using Element = typename P::Element;
    const int rows = tile.end_row - tile.row - member * Shape::kWarpgroupRows;
    if (Shape::kTileWarpgroups > 1 && rows <= 0) {
      skip_k_blocks(shared_.ring, tile, blocks_of(p_.b, tile));
    } else if constexpr (OperandA::kScaled) {
      multiply_scaled_k_blocks<Element>(shared_.ring, p_.a, p_.b, tile, member, acc[0]);
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
__global__ void __launch_bounds__(P::Shape::kThreads, P::Shape::kCtasPerSm)
    grouped_gemm_wgmma(const __grid_constant__ P product) {
  extern __shared__ __align__(1024) char memory[];
  GroupedProduct<P>(product, *reinterpret_cast<SharedMemory<typename P::Shape>*>(memory)).run();
}

}  // namespace anabranch::cuda::hopper
