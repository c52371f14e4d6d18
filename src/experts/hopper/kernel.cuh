// The grouped product: a persistent block a multiprocessor, one warpgroup that finds tiles and loads, two that multiply
// and store.
//
//   warpgroup 0, warp 0   starts the copies of the copy engine
//                warp 1   finds the block's tiles and puts them into the queue
//                (all)    if a factor is gathered, copies it
//   warpgroups 1, 2       take tiles from the queue (as teams, see TileShape), multiply, store
#pragma once

#include "core/cuda/launch.h"
#include "core/cuda/registers.cuh"
#include "experts/hopper/mainloop.cuh"
#include "experts/hopper/store.cuh"
#include "experts/hopper/tile_queue.cuh"

namespace anabranch::cuda {

// What a product is made of. Finder: which tiles there are (row_tiles.cuh). Target: what becomes of the result
// (store.cuh). Each warp has 16 rows of every panel and calls
//   begin(writer, tile, row)                     once a tile, before it multiplies, with its row of the first panel:
//                                                starts to read what write() will need
//   read_on(ahead)                               while it multiplies, if its warpgroup has rows: to read what begin()
//                                                has found the place of
//   write(writer, tile, row, panel, acc, ahead)  panel after panel, with what begin() gave
//   write_zeros(writer, tile, row)               instead, for a tile of no terms
template <class Shape_, class Element_, class OperandA_, class OperandB_, class Groups_, class Finder_, class Target_>
struct Product {
  using Shape = Shape_;
  using Element = Element_;
  using OperandA = OperandA_;
  using OperandB = OperandB_;
  using Groups = Groups_;
  using Finder = Finder_;
  using Target = Target_;

  OperandA a;
  OperandB b;
  Target out;
  Groups groups;
};

template <class Shape>
struct alignas(1024) SharedMemory {
  OperandRing<Shape> ring;
  alignas(1024) char strips[Shape::kConsumers * 4][kStrips * kStripBytes];
  TileQueue queue;
};

template <class P>
class GroupedProduct {
  using Shape = typename P::Shape;
  using OperandA = typename P::OperandA;
  using OperandB = typename P::OperandB;
  static constexpr bool kGathers = OperandA::kGathered || OperandB::kGathered;
  static constexpr int kGatherers = kGathers ? 4 : 0;  // warps

 public:
  __device__ GroupedProduct(const P& product, SharedMemory<Shape>& shared) : p_(product), shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      shared_.ring.init(kGatherers * kWarp);
      shared_.queue.init(Shape::kTeamWarps + (kGathers ? kGatherers - 1 : 1));
      fence_barrier_init();
      p_.a.prefetch();
      p_.b.prefetch();
      p_.out.prefetch();
    }
    sync_cluster<Shape::kBlocks>();
    wait_for_previous_kernel();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      give_up_registers<kProducerRegisters>();
      if (warp_index() == 1) {
        find_tiles();
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
  static constexpr bool kProducerTakesMore = kGathers && !P::Target::template kTakesRegisters<Shape>;
  static constexpr int kProducerRegisters = kProducerTakesMore ? 56 : 40;
  static constexpr int kConsumerRegisters = kProducerTakesMore ? 224 : 232;
  static_assert(kProducerRegisters + Shape::kConsumers * kConsumerRegisters <= 65536 / Shape::kThreads / 8 * 8 * 3);

  __device__ void find_tiles() {
    typename P::Finder finder(p_.groups);
    int32_t steps = 0;
    int n = 0;
    for (;; ++n) {
      Tile tile = finder.next(n);
      tile.first_step = steps;
      shared_.queue.put(n, tile);
      if (tile.expert == kNoTile) break;
      steps += tile.steps;
      if constexpr (kGathers) load_steps(shared_.ring, p_.a, p_.b, tile, false);
    }
    for (int team = 1; team < Shape::kTeams; ++team) shared_.queue.put(n + team, {.expert = kNoTile});
    let_next_kernel_start();
  }

  // leads: the warp starts the copies of the copy engine.
  __device__ void load_tiles(bool leads) {
    for (int n = 0;; ++n) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) return;
      load_steps(shared_.ring, p_.a, p_.b, tile, leads);
    }
  }

  __device__ void consume(int warpgroup) {
    const int team = Shape::kTeams == 1 ? 0 : warpgroup;
    const int warp = warp_index() - kWarpgroup / kWarp;  // of the consumers
    StripWriter writer(shared_.strips[warp]);
    for (int n = team;; n += Shape::kTeams) {
      const Tile tile = shared_.queue.get(n);
      if (tile.expert == kNoTile) break;
      const int thread = thread_index_anew();
      const int member = Shape::kTeams == 1 ? thread / kWarpgroup - 1 : 0;
      const int first_row = member * Shape::kWarpgroupRows + thread / kWarp % 4 * kStripRows;
      float acc[Shape::kWarpgroupPanels][Shape::kColumns / 2];
      auto ahead = p_.out.template begin<Shape>(writer, tile, first_row);
      shared_.ring.begin_turn(n);
      if (tile.steps > 0) {
        multiply(n, tile, member, acc, [&] { p_.out.template read_on<Shape>(ahead); });
      } else {
        shared_.ring.end_turn(n);
      }
#pragma unroll
      for (int panel = 0; panel < Shape::kWarpgroupPanels; ++panel) {
        const int row = first_row + panel * kPanel;
        if (tile.steps > 0) {
          p_.out.template write<Shape>(writer, tile, row, panel, acc[panel], ahead);
        } else {
          p_.out.template write_zeros<Shape>(writer, tile, row);
        }
      }
    }
    writer.finish();
  }

  // Which threadIdx.x would be kept in a register for: accumulators take them all.
  static __device__ int thread_index_anew() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }

  // Only panels that have rows of the expert.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(int n, const Tile& tile, int member,
                                           float (&acc)[Shape::kWarpgroupPanels][Shape::kColumns / 2],
                                           const Meanwhile& meanwhile) {
    using Element = typename P::Element;
    const int rows = tile.end_row - tile.row - member * Shape::kWarpgroupRows;
    if (Shape::kTeamWarpgroups > 1 && rows <= 0) {
      skip_steps(shared_.ring, tile);
    } else if (Shape::kWarpgroupPanels == 1 || rows <= kPanel) {
      multiply_steps<1, Element, OperandA, OperandB>(shared_.ring, n, tile, member, acc, meanwhile);
    } else {
      multiply_steps<Shape::kWarpgroupPanels, Element, OperandA, OperandB>(shared_.ring, n, tile, member, acc,
                                                                           meanwhile);
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

}  // namespace anabranch::cuda
