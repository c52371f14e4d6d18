// TMA copies between tensors in device memory and shared memory; one thread issues a copy.
#pragma once

#include <cuda.h>

#include "core/cuda/barrier.cuh"
#include "core/cuda/cluster.cuh"
#include "core/cuda/tile_memory.cuh"

namespace anabranch::cuda {

// The origin of a box in a row window map (tensor_map.h): a row of the range that ends before row `end`.
struct WindowCoordinates {
  int column;
  int row;
  int end;
};

// The origin of a box in a map of matrices.
struct MatrixCoordinates {
  int column;
  int row;
  int matrix;
};

constexpr int kWindow = 1 << 30;  // kMaxWindowRows

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Loads a box. The phase of `barrier` must expect all bytes of the box, including zeros outside the tensor.
__device__ __forceinline__ void load_box(const CUtensorMap& map, uint32_t to, Barrier& barrier,
                                         const WindowCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];"
      :
      : "r"(to), "l"(&map), "r"(at.column), "r"(kWindow - (at.end - at.row)), "r"(at.end), "r"(kWindow),
        "r"(barrier.address())
      : "memory");
}

__device__ __forceinline__ void load_box(const CUtensorMap& map, uint32_t to, Barrier& barrier,
                                         const MatrixCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(to), "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(barrier.address())
      : "memory");
}

// Loads a box for all blocks of the multicast: it arrives at the same address in each block's shared memory, and at the
// corresponding barrier of each block.
template <int kBlocks>
__device__ __forceinline__ void load_box(const CUtensorMap& map, uint32_t to, Barrier& barrier,
                                         const MatrixCoordinates& at, const Multicast<kBlocks>& multicast) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;"
      :
      : "r"(to), "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(barrier.address()), "h"(multicast.to)
      : "memory");
}
template <>
__device__ __forceinline__ void load_box(const CUtensorMap& map, uint32_t to, Barrier& barrier,
                                         const MatrixCoordinates& at, const Multicast<1>&) {
  load_box(map, to, barrier, at);
}

// Loads a box through a shuffled map of matrices. The first row must be a multiple of 32.
template <int kBlocks>
__device__ __forceinline__ void load_shuffled_box(const CUtensorMap& map, uint32_t to, Barrier& barrier,
                                                  const MatrixCoordinates& at, const Multicast<kBlocks>& multicast) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4, %3, %5}], [%6], %7;"
      :
      : "r"(to), "l"(&map), "r"(at.column), "r"(0), "r"(at.row / 8), "r"(at.matrix), "r"(barrier.address()),
        "h"(multicast.to)
      : "memory");
}

// Copies from shared memory to the same address in another block of the cluster. Completes on the barrier at the same
// address as `barrier` in that block, which must expect the bytes. Source and size are multiples of 16 bytes.
__device__ __forceinline__ void copy_to_block(uint32_t from, uint32_t bytes, const Barrier& barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .u32 to;\n"
      ".reg .u32 expecting;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 expecting, %2, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %1, [expecting];\n"
      "}\n"
      :
      : "r"(from), "r"(bytes), "r"(barrier.address()), "r"(block)
      : "memory");
}

// Stores a box. Elements outside the tensor, or past the window, are discarded.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, const WindowCoordinates& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :
               : "l"(&map), "r"(at.column), "r"(kWindow - (at.end - at.row)), "r"(at.end), "r"(kWindow), "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, const MatrixCoordinates& at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
               :
               : "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(from)
               : "memory");
}

// Adds float32 elements to the tensor; each addition rounds once. Several additions to one element happen in any order.
__device__ __forceinline__ void add_box(const CUtensorMap& map, uint32_t from, const MatrixCoordinates& at) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
               :
               : "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(from)
               : "memory");
}

// Closes a group that contains this thread's stores since the last call.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last kGroups groups of this thread's stores have finished reading shared memory.
template <int kGroups>
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}

}  // namespace anabranch::cuda
