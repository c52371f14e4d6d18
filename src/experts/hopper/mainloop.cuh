// The multiplication of a tile: a ring of steps in shared memory that producers fill and warpgroups multiply.
//
//   slot s of the ring:  a[s]  kRows / 64 panels     full[s]   the step is there
//                        b[s]  kColumns / 64 panels  empty[s]  the warps of the team are done with it
//
// The blocks of a cluster go step by step together: each fills slots of its own and, with its part of B, the other
// blocks', so that a slot is empty when the teams of all blocks are done with it.
//
// Teams take turns with their tiles: a wait tells the phases of a barrier apart by parity alone, so a warp may wait for
// a step only when the step before it in the same slot is known to have come. A team knows that of its own steps; of
// the other team's it knows when that team has ended its turn, which is when it has seen all steps of its tile.
#pragma once

#include "core/cuda/warp.cuh"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

template <class Shape>
struct OperandRing {
  using Position = RingPosition<Shape::kStages>;

  char a[Shape::kStages][Shape::kBytesA];
  char b[Shape::kStages][Shape::kBytesB];
  Barrier full[Shape::kStages];
  Barrier empty[Shape::kStages];
  Barrier turn_ended[Shape::kTeams];

  // By one thread, before all others. copying_threads: those that arrive after copies of their own.
  __device__ void init(int copying_threads) {
    for (int i = 0; i < Shape::kStages; ++i) {
      full[i].init(static_cast<uint32_t>(1 + copying_threads));
      empty[i].init(Shape::kTeamWarps * Shape::kBlocks);
    }
    for (Barrier& ended : turn_ended) ended.init(Shape::kTeamWarps);
  }

  // By the warps of a team, around their waits for the steps of the block's n-th tile, one without steps included.
  __device__ void begin_turn(int n) {
    if constexpr (Shape::kTeams > 1) {
      if (n == 0) return;
      const auto before = RingPosition<Shape::kTeams>::of(n - 1);
      turn_ended[before.slot].wait(before.phase);
      __syncwarp();  // no lane may fall a phase behind
    }
  }
  __device__ void end_turn(int n) {
    if constexpr (Shape::kTeams > 1) {
      if (lane_index() == 0) turn_ended[n % Shape::kTeams].arrive();
    }
  }

  __device__ void release(const Position& at) {
    if constexpr (Shape::kBlocks == 1) {
      if (lane_index() == 0) empty[at.slot].arrive();
    } else {
      if (lane_index() < Shape::kBlocks) empty[at.slot].arrive_in_block(static_cast<uint32_t>(lane_index()));
    }
  }
};

// Brings the steps of a tile into the ring. By the warp that leads; if a factor is gathered, by all four warps of the
// warpgroup.
template <class Shape, class OperandA, class OperandB>
__device__ __forceinline__ void load_steps(OperandRing<Shape>& ring, const OperandA& a, const OperandB& b,
                                           const Tile& tile, bool leads) {
  constexpr uint32_t kBytes =
      (OperandA::kGathered ? 0 : Shape::kBytesA) + (OperandB::kGathered ? 0 : Shape::kBytesB);  // of the copy engine
  typename OperandA::template Gather<Shape::kRows> gather_a(a, tile);
  typename OperandB::template Gather<Shape::kColumns> gather_b(b, tile);
  auto at = OperandRing<Shape>::Position::of(tile.first_step);
#pragma unroll 1  // the producer has few registers
  for (int step = 0; step < tile.steps; ++step, at.advance()) {
    Barrier& full = ring.full[at.slot];
    ring.empty[at.slot].wait(at.phase ^ 1u);
    __syncwarp();  // no lane may fall a phase behind
    if (leads && lane_index() == 0) {
      full.arrive_and_expect(kBytes);
      a.template load<Shape::kRows>(shared_address(ring.a[at.slot]), full, tile, step, Share<1>{});
      b.template load<Shape::kColumns>(shared_address(ring.b[at.slot]), full, tile, step,
                                       Share<Shape::kBlocks>::of(tile.in_common != 0));
    }
    gather_a.copy(shared_address(ring.a[at.slot]), tile, step);
    gather_b.copy(shared_address(ring.b[at.slot]), tile, step);
    if constexpr (OperandA::kGathered || OperandB::kGathered) full.arrive_after_copies();
  }
}

// acc = A B over the steps of the block's n-th tile, for the first kUsed panels of the warpgroup's rows; `member`:
// which part of the tile's rows the warpgroup has. Ends the turn. `meanwhile` is called once, with the last products on
// their way.
template <int kUsed, class Element, class OperandA, class OperandB, class Shape, class Meanwhile>
__device__ __forceinline__ void multiply_steps(OperandRing<Shape>& ring, int n, const Tile& tile, int member,
                                               float (&acc)[Shape::kWarpgroupPanels][Shape::kColumns / 2],
                                               const Meanwhile& meanwhile) {
  using Multiply = Wgmma<Shape::kColumns, OperandA::kMajor, OperandB::kMajor, Element>;
  auto at = OperandRing<Shape>::Position::of(tile.first_step);
  auto before = at;
  const Descriptor first_a = make_descriptor(shared_address(ring.a[0])) + member * Shape::kWarpgroupPanels * kNextPanel;
  const Descriptor first_b = make_descriptor(shared_address(ring.b[0]));
#pragma unroll
  for (int panel = 0; panel < kUsed; ++panel) begin_accumulators(acc[panel]);
  for (int step = 0; step < tile.steps; ++step) {
    ring.full[at.slot].wait(at.phase);
    if constexpr (OperandA::kGathered || OperandB::kGathered) fence_async_proxy();
    const Descriptor a = first_a + at.slot * (Shape::kBytesA / kPanelBytes) * kNextPanel;
    const Descriptor b = first_b + at.slot * (Shape::kBytesB / kPanelBytes) * kNextPanel;
    fence_accumulators();
#pragma unroll
    for (int k = 0; k < kStepTerms / kWgmmaDepth; ++k) {
#pragma unroll
      for (int panel = 0; panel < kUsed; ++panel) {
        Multiply::begin(acc[panel], a + panel * kNextPanel + k * kNextTerms<OperandA::kMajor>,
                        b + k * kNextTerms<OperandB::kMajor>, k == 0 ? step : 1);
      }
    }
    commit_products();
    // The step before is done: its slot can be filled again.
    wait_for_products<1>();
    if (step > 0) ring.release(before);
    before = at;
    at.advance();
  }
  ring.end_turn(n);
  meanwhile();
  wait_for_products<0>();
  ring.release(before);
#pragma unroll
  for (int panel = 0; panel < kUsed; ++panel) finish_accumulators(acc[panel]);
}

// For a warpgroup none of whose rows are the expert's.
template <class Shape>
__device__ __forceinline__ void skip_steps(OperandRing<Shape>& ring, const Tile& tile) {
  auto at = OperandRing<Shape>::Position::of(tile.first_step);
  for (int step = 0; step < tile.steps; ++step, at.advance()) {
    ring.full[at.slot].wait(at.phase);
    __syncwarp();  // no lane may fall a phase behind
    ring.release(at);
  }
}

}  // namespace anabranch::cuda
