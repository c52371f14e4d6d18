// Shared memory of tensor cores and TMA: the fence between proxies, swizzles, matrix stores.
#pragma once

#include <cstdint>

#include "core/cuda/copy_groups.cuh"

namespace anabranch::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// wgmma and TMA access shared memory through the "async proxy". After this fence they see what this thread has written
// through the generic proxy, and what it has observed of other threads' writes.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The 128-byte swizzle of TMA and wgmma: in blocks of 8 rows of 128 bytes (1024-byte aligned), 16-byte chunk c of row r
// is stored at chunk c ^ (r % 8). Returns the byte offset of a chunk.
__device__ __forceinline__ constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Advances an address in chunk c of a row to chunk c + chunks of that row. c and `chunks` must have no common bits.
__device__ __forceinline__ constexpr uint32_t advance_chunks(uint32_t address, uint32_t chunks) {
  return address ^ chunks << 4;
}

// Bytes per row of a shared memory tile: one swizzle atom.
constexpr int kSwizzleBytes = 128;

// Stores four 8x8 matrices of 16-bit elements from the registers in which mma instructions produce them. Lane i
// supplies the 16-byte aligned address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_shared_zeros(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" : : "r"(address), "r"(0) : "memory");
}

}  // namespace anabranch::cuda
