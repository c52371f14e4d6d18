// Main loop of a tile: producers fill a ring of stages in shared memory with k-blocks, consumers multiply them.
//
//   stage s of the ring:  a[s]  kRows / 64 panels     full[s]   the k-block has arrived
//                         b[s]  kColumns / 64 panels  empty[s]  the warps of the tile have read it
//
// The CTAs of a cluster advance together, k-block by k-block. Each CTA multicasts its part of B, or copies what it
// has decoded, to the stages of the other CTAs, so a stage is empty when the consumers of all CTAs have read it.
//
// mbarrier waits only see a phase's parity. With ping-pong consumers one warpgroup could lag a whole ring behind and
// mistake phase p + 2 for p. So a warpgroup enters its main loop only after the other has left its own.
#pragma once

#include <type_traits>

#include "core/cuda/warp.cuh"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

// Packed k-blocks that wait to be decoded; each thread uses a part of its own.
template <int kBytes>
struct PackedMemory {
  alignas(1024) char packed[kBytes];
};
template <>
struct PackedMemory<0> {};

template <class Shape>
struct OperandRing : PackedMemory<Shape::kPackedBytes> {
  using Position = RingPosition<Shape::kStages>;

  char a[Shape::kStages][Shape::kBytesA];
  char b[Shape::kStages][Shape::kBytesB];
  Barrier full[Shape::kStages];
  Barrier empty[Shape::kStages];
  Barrier mainloop_ended[Shape::kTilesInFlight];

  // Called by one thread before any other use. arrivals: of the producers per k-block, without the leading warp's.
  __device__ void init(int arrivals) {
    for (int i = 0; i < Shape::kStages; ++i) {
      full[i].init(static_cast<uint32_t>(1 + arrivals));
      empty[i].init(Shape::kTileWarps * Shape::kBlocks);
    }
    for (Barrier& ended : mainloop_ended) ended.init(Shape::kTileWarps);
  }

  // Called by the warps of the CTA's n-th tile around their waits for its k-blocks, also for tiles without k-blocks.
  __device__ void begin_mainloop(int n) {
    if constexpr (Shape::kTilesInFlight > 1) {
      if (n == 0) return;
      const auto before = RingPosition<Shape::kTilesInFlight>::nth(n - 1);
      mainloop_ended[before.stage].wait(before.phase);
      __syncwarp();  // no lane may lag a phase behind
    }
  }
  __device__ void end_mainloop(int n) {
    if constexpr (Shape::kTilesInFlight > 1) {
      if (lane_index() == 0) mainloop_ended[n % Shape::kTilesInFlight].arrive();
    }
  }

  __device__ void release(const Position& at) {
    if constexpr (Shape::kBlocks == 1) {
      if (lane_index() == 0) empty[at.stage].arrive();
    } else {
      if (lane_index() < Shape::kBlocks) empty[at.stage].arrive_in_block(static_cast<uint32_t>(lane_index()));
    }
  }
};

// The operands that a producer warpgroup gathers or decodes. The leading warp issues the TMA loads of both.
//
// With two producer warpgroups, each decodes half of the packed weights. If the other CTA of the cluster needs the same
// ones, the first warpgroup decodes nothing: the second ones of both CTAs decode half each, and copy it to the other.
enum class Loads { both, a, b };

// Whether the threads of a producer warpgroup copy to the ring.
template <Loads kLoads, class OperandA, class OperandB>
constexpr bool kCopies =
    (kLoads != Loads::b && OperandA::kGathered) || (kLoads != Loads::a && OperandB::kGathered && !OperandB::kPacked);

// Arrivals of a producer warpgroup for a k-block, without the leading warp's: of its threads, after their copies, or of
// its warps. With packed weights the warps of both warpgroups arrive for each k-block, also if they have decoded none:
// a warp that skipped k-blocks could mistake a phase of `empty` for a later one.
template <Loads kLoads, class OperandA, class OperandB>
constexpr int kArrivals = kCopies<kLoads, OperandA, OperandB> ? kWarpgroup : (OperandB::kPacked ? 4 : 0);

// Loads the k-blocks of a tile into the ring. Called by the leading warp, or by all warps of a producer warpgroup that
// gathers or decodes.
template <Loads kLoads, class Shape, class OperandA, class OperandB>
__device__ __forceinline__ void load_k_blocks(OperandRing<Shape>& ring, const OperandA& a, const OperandB& b,
                                              const Tile& tile, bool is_leader) {
  constexpr bool kLoadsA = kLoads != Loads::b;
  constexpr bool kLoadsB = kLoads != Loads::a;
  constexpr bool kDecodes = kLoadsB && OperandB::kPacked;
  const bool is_shared = Shape::kBlocks > 1 && tile.multicasts_b != 0;
  const uint32_t bytes = a.template bytes<Shape::kRows>(tile) + b.template bytes<Shape::kColumns>(tile);
  auto gather_b = [&] {
    using Gather = typename OperandB::template Gather<Shape::kColumns, kCopies<kLoads, OperandA, OperandB>>;
    if constexpr (kDecodes) {
      constexpr int kBytes = Shape::kPackedBytes / Shape::kProducers;
      const uint32_t memory = shared_address(ring.packed) + (kLoadsA ? 0 : kBytes);
      const int portion = kLoadsA ? 0 : is_shared ? static_cast<int>(block_in_cluster<Shape::kBlocks>()) : 1;
      return Gather(b, tile, memory, portion);
    } else {
      return std::conditional_t<kLoadsB, Gather, NoGather>(b, tile);
    }
  }();
  auto gather_a = [&] {
    using Gather = typename OperandA::template Gather<Shape::kRows, kDecodes>;
    return std::conditional_t<kLoadsA, Gather, NoGather>(a, tile);
  }();
  const auto arrive = [&](Barrier& full) {
    if constexpr (kCopies<kLoads, OperandA, OperandB>) {
      full.arrive_after_copies();
    } else if constexpr (OperandB::kPacked) {
      __syncwarp();
      if (lane_index() == 0) full.arrive();
    }
  };
  auto at = OperandRing<Shape>::Position::nth(tile.first_k_block);
  // Fills a stage with loads that `load` issues, of `bytes` in total.
  const auto load_by_tma = [&](uint32_t bytes, const auto& load) {
    Barrier& full = ring.full[at.stage];
    ring.empty[at.stage].wait(at.phase ^ 1u);
    __syncwarp();
    if (is_leader && lane_index() == 0) {
      full.arrive_and_expect(bytes);
      load(full, Multicast<Shape::kBlocks>::make(tile.multicasts_b != 0));
    }
    arrive(full);
    at.advance();
  };
  if constexpr (OperandB::kMayHaveBias) {
    if (tile.k_blocks > 0 && b.bias_blocks > 0) {
      constexpr uint32_t kBiasBytes = Shape::kColumns / kPanel * kWgmmaK * kSwizzleBytes;
      load_by_tma(kBiasBytes, [&](Barrier& full, const auto& multicast) {
        b.bias.template load<Shape::kColumns>(shared_address(ring.b[at.stage]), full, tile, 0, multicast);
      });
    }
  }
#pragma unroll 1  // the producer has few registers
  for (int k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
    Barrier& full = ring.full[at.stage];
    ring.empty[at.stage].wait(at.phase ^ 1u);
    __syncwarp();  // no lane may lag a phase behind
    if (is_leader && lane_index() == 0) {
      full.arrive_and_expect(bytes);
      a.template load<Shape::kRows>(shared_address(ring.a[at.stage]), full, tile, k_block, Multicast<1>{});
      b.template load<Shape::kColumns>(shared_address(ring.b[at.stage]), full, tile, k_block,
                                       Multicast<Shape::kBlocks>::make(tile.multicasts_b != 0));
    }
    gather_a.copy(shared_address(ring.a[at.stage]), tile, k_block);
    gather_b.copy(shared_address(ring.b[at.stage]), tile, k_block);
    arrive(full);
    if constexpr (kDecodes) {
      if (kLoads == Loads::b && is_shared && lane_index() == 0) {
        static_assert(kLoads != Loads::b || !kCopies<kLoads, OperandA, OperandB>, "arrive() must synchronise the warp");
        // A warp's rows are adjacent, and each lane has fenced its stores. The stage is not used again before the copy
        // has read it: the other block releases it after the bytes have arrived.
        constexpr uint32_t kBytes = Shape::kBytesB / Shape::kBlocks / 4;
        const uint32_t block = block_in_cluster<Shape::kBlocks>();
        copy_to_block(shared_address(ring.b[at.stage]) + (block * 4 + warp_index() % 4) * kBytes, kBytes, full,
                      block ^ 1u);
      }
      gather_b.end_copy(tile, k_block);
    }
  }
  if constexpr (OperandB::kMayHaveLowRank) {
    if (tile.k_blocks == 0) return;
    const int low_rank_blocks = b.low_rank_blocks();
#pragma unroll 1
    for (int k_block = 0; k_block < low_rank_blocks; ++k_block) {
      load_by_tma(
          b.u.template bytes<Shape::kRows>(tile) + b.b.template bytes<Shape::kColumns>(tile),
          [&](Barrier& full, const auto& multicast) {
            b.u.template load<Shape::kRows>(shared_address(ring.a[at.stage]), full, tile, k_block, Multicast<1>{});
            b.b.template load<Shape::kColumns>(shared_address(ring.b[at.stage]), full, tile, k_block, multicast);
          });
    }
  }
}

// acc = A B + bias + u B_factor over the k-blocks of the CTA's n-th tile, for the first kUsed panels of the
// warpgroup's rows.
// member: the warpgroup's share of the tile's rows. Ends the main loop. Calls during_products() after the MMAs of each
// k-block have been issued, and during_last_products() before waiting for the last MMAs.
template <int kUsed, class Element, class OperandA, class OperandB, class Shape, class During, class DuringLast>
__device__ __forceinline__ void multiply_k_blocks(OperandRing<Shape>& ring, const OperandB& operand_b, int n,
                                                  const Tile& tile, int member,
                                                  float (&acc)[Shape::kWarpgroupPanels][Shape::kColumns / 2],
                                                  const During& during_products,
                                                  const DuringLast& during_last_products) {
  constexpr int kMmaColumns = Shape::kMmaColumns;
  using Multiply = Wgmma<kMmaColumns, OperandA::kMajor, OperandB::kMajor, Element>;
  auto at = OperandRing<Shape>::Position::nth(tile.first_k_block);
  auto before = at;
  const Descriptor first_a = make_descriptor(shared_address(ring.a[0])) + member * Shape::kWarpgroupPanels * kNextPanel;
  const Descriptor first_b = make_descriptor(shared_address(ring.b[0]));
#pragma unroll
  for (int panel = 0; panel < kUsed; ++panel) begin_accumulators(acc[panel]);
  // Calls begin(accumulators, a, b) for the MMAs of 16 k that cover all panels and columns. a, b: descriptors of the
  // first panels.
  const auto for_mmas = [&](Descriptor a, Descriptor b, const auto& begin) {
#pragma unroll
    for (int panel = 0; panel < kUsed; ++panel) {
#pragma unroll
      for (int column = 0; column < Shape::kColumns; column += kMmaColumns) {
        begin(reinterpret_cast<float (&)[kMmaColumns / 2]>(acc[panel][column / 2]), a + panel * kNextPanel,
              b + column / kPanel * kNextPanel);
      }
    }
  };
  int block = 0;
  if constexpr (OperandB::kMayHaveBias) {
    // MMAs are predicated, not branched around: with a branch the compiler would wait for every single wgmma.
    block = operand_b.bias_blocks;
    if (block > 0) ring.full[at.stage].wait(at.phase);
    fence_accumulators();
    for_mmas(
        0, first_b + at.stage * (Shape::kBytesB / kPanelBytes) * kNextPanel,
        [&](auto& sums, Descriptor, Descriptor b) { WgmmaOfOnes<kMmaColumns, Element>::begin_if(block, sums, b); });
    commit_products();
    if (block > 0) at.advance();
  }
  constexpr int kSteps = kBlockK / kWgmmaK;
  int blocks = tile.k_blocks + block;
  if constexpr (OperandB::kMayHaveLowRank) blocks += operand_b.low_rank_steps / kSteps;
  for (; block < blocks; ++block) {
    ring.full[at.stage].wait(at.phase);
    if constexpr (OperandA::kGathered || OperandB::kGathered) fence_async_proxy();
    const Descriptor a = first_a + at.stage * (Shape::kBytesA / kPanelBytes) * kNextPanel;
    const Descriptor b = first_b + at.stage * (Shape::kBytesB / kPanelBytes) * kNextPanel;
    fence_accumulators();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      for_mmas(
          a + k * kNextK<OperandA::kMajor>, b + k * kNextK<OperandB::kMajor>,
          [&](auto& sums, Descriptor of_a, Descriptor of_b) { Multiply::begin(sums, of_a, of_b, k == 0 ? block : 1); });
    }
    commit_products();
    // The previous k-block is done: its stage can be filled again.
    wait_for_products<1>();
    if (block > 0) ring.release(before);
    during_products();
    before = at;
    at.advance();
  }
  if constexpr (OperandB::kMayHaveLowRank) {
    // The last block of a low-rank term, if it is not whole.
    const int steps = operand_b.low_rank_steps % kSteps;
    if (steps > 0) ring.full[at.stage].wait(at.phase);
    const Descriptor a = first_a + at.stage * (Shape::kBytesA / kPanelBytes) * kNextPanel;
    const Descriptor b = first_b + at.stage * (Shape::kBytesB / kPanelBytes) * kNextPanel;
    fence_accumulators();
#pragma unroll
    for (int k = 0; k + 1 < kSteps; ++k) {
      for_mmas(a + k * kNextK<OperandA::kMajor>, b + k * kNextK<OperandB::kMajor>,
               [&](auto& sums, Descriptor of_a, Descriptor of_b) { Multiply::begin_if(k < steps, sums, of_a, of_b); });
    }
    commit_products();
  }
  ring.end_mainloop(n);
  during_last_products();
  wait_for_products<0>();
  ring.release(before);
  if constexpr (OperandB::kMayHaveLowRank) {
    if (operand_b.low_rank_steps % kSteps > 0) ring.release(at);
  }
#pragma unroll
  for (int panel = 0; panel < kUsed; ++panel) finish_accumulators(acc[panel]);
}

// The main loop of a warpgroup without rows of the expert. blocks: number of k-blocks of the tile.
template <class Shape>
__device__ __forceinline__ void skip_k_blocks(OperandRing<Shape>& ring, const Tile& tile, int blocks) {
  auto at = OperandRing<Shape>::Position::nth(tile.first_k_block);
  for (int block = 0; block < blocks; ++block, at.advance()) {
    ring.full[at.stage].wait(at.phase);
    __syncwarp();  // no lane may lag a phase behind
    ring.release(at);
  }
}

}  // namespace anabranch::cuda::hopper
