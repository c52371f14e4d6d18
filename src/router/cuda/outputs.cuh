// Writes the outputs of a forward kernel for the selected experts: a warp's slots, which are in shared memory in token
// order, and dense rows, to which slots are scattered in shared memory. Uses whole vectors if addresses allow.
#pragma once

#include <cstdint>

#include "core/cuda/shared_array.cuh"
#include "core/cuda/warp.cuh"
#include "router/cuda/row.cuh"
#include "router/forward.h"

namespace anabranch::cuda {

// Bytes per row of a dense routing map; 0 if none is requested.
__host__ __device__ inline unsigned map_row_bytes(const RouterForward& op) {
  return op.map_format == MapFormat::bytes  ? static_cast<unsigned>(op.E)
         : op.map_format == MapFormat::bits ? static_cast<unsigned>((op.E + 7) / 8)
                                            : 0;
}

// Copies bytes from shared to global memory, with one warp.
template <class T>
__device__ __forceinline__ void copy_out_as(unsigned from, char* out, unsigned bytes) {
#pragma unroll 1
  for (unsigned i = lane_index() * sizeof(T); i < bytes; i += kWarp * sizeof(T)) {
    *reinterpret_cast<T*>(out + i) = load_shared<T>(from + i);
  }
}
__device__ __forceinline__ void copy_out(unsigned from, char* out, unsigned bytes) {
  const unsigned alignment = static_cast<unsigned>(reinterpret_cast<uintptr_t>(out)) | bytes;
  if (alignment % 16 == 0) {
    copy_out_as<uint4>(from, out, bytes);
  } else if (alignment % 4 == 0) {
    copy_out_as<uint32_t>(from, out, bytes);
  } else {
    copy_out_as<uint8_t>(from, out, bytes);
  }
}
// Copies kWarp * kChunks chunks of 16 bytes.
template <unsigned kChunks>
__device__ __forceinline__ void copy_chunks_out(unsigned from, char* out) {
  uint4 chunks[kChunks];
  const unsigned offset = lane_index() * 16;
#pragma unroll
  for (unsigned i = 0; i < kChunks; ++i) chunks[i] = load_shared<uint4>(from + offset + i * kWarp * 16);
#pragma unroll
  for (unsigned i = 0; i < kChunks; ++i) *reinterpret_cast<uint4*>(out + offset + i * kWarp * 16) = chunks[i];
}

struct Outputs {
  const RouterForward& op;
  SharedArray<int32_t> experts;  // [tokens][K], -1: none
  SharedArray<float> weights;    // [tokens][K]
  unsigned probs;                // space for [tokens][E] in the dtype of the logits
  unsigned map;                  // [tokens][map_row_bytes], zeros

  __device__ __forceinline__ unsigned element_size() const { return op.logits_dtype == AB_FLOAT32 ? 4 : 2; }
  __device__ __forceinline__ bool has_map() const {
    return op.map_format == MapFormat::bytes || op.map_format == MapFormat::bits;
  }
  __device__ __forceinline__ unsigned columns() const { return static_cast<unsigned>(op.E); }

  __device__ __forceinline__ void clear_map(unsigned tokens) const {
    if (!has_map()) return;
    const unsigned bytes = tokens * map_row_bytes(op);
#pragma unroll 1
    for (unsigned i = lane_index() * 4; i < bytes; i += kWarp * 4) store_shared(map + i, 0u);
  }

  // Writes the slots of `count` tokens, starting at `first`.
  __device__ __forceinline__ void write_slots(unsigned first, unsigned count) const {
    const auto K = static_cast<unsigned>(op.K);
    const uint64_t slot = static_cast<uint64_t>(first) * K;
    if (op.weights != nullptr) copy_out(weights.address(), reinterpret_cast<char*>(op.weights + slot), count * K * 4);
    if (op.experts != nullptr) copy_out(experts.address(), reinterpret_cast<char*>(op.experts + slot), count * K * 4);
    if (op.map_format == MapFormat::indices) {
#pragma unroll 1
      for (unsigned i = lane_index(); i < count * K; i += kWarp) {
        const int32_t expert = experts[i];
        switch (op.map_dtype) {
          case AB_INT16: static_cast<int16_t*>(op.routing_map)[slot + i] = static_cast<int16_t>(expert); break;
          case AB_INT64: static_cast<int64_t*>(op.routing_map)[slot + i] = expert; break;
          default: static_cast<int32_t*>(op.routing_map)[slot + i] = expert; break;
        }
      }
    }
  }

  __device__ __forceinline__ void clear_probs(unsigned count) const {
    const unsigned bytes = count * columns() * element_size();
#pragma unroll 1
    for (unsigned i = lane_index() * 16; i < bytes; i += kWarp * 16) store_shared(probs + i, uint4{});
  }

  // Scatters a weight of the token-th token to its dense row.
  __device__ __forceinline__ void scatter_weight(unsigned token, unsigned expert, float weight) const {
    const unsigned place = token * columns() + expert;
    if (op.logits_dtype == AB_FLOAT32) {
      store_shared(probs + place * 4, weight);
    } else {
      const uint16_t bits =
          op.logits_dtype == AB_BFLOAT16 ? from_float<BFloat16>(weight).bits : from_float<Float16>(weight).bits;
      store_shared(probs + place * 2, bits);
    }
  }
  __device__ __forceinline__ void mark(unsigned token, unsigned expert) const {
    if (op.map_format == MapFormat::bytes) {
      store_shared(map + token * columns() + expert, uint8_t{1});
    } else {
      const unsigned bit = token * map_row_bytes(op) * 8 + expert;
      SharedArray<uint32_t>(map).set_bits(bit / 32, 1u << (bit % 32));
    }
  }
  __device__ __forceinline__ void unmark(unsigned token, unsigned expert) const {
    const unsigned place = op.map_format == MapFormat::bytes ? expert : expert / 8;
    store_shared(map + token * map_row_bytes(op) + place, uint8_t{0});
  }

  __device__ __forceinline__ char* probs_row(unsigned first) const {
    return static_cast<char*>(op.probs) + static_cast<uint64_t>(first) * (columns() * element_size());
  }
  __device__ __forceinline__ char* map_row(unsigned first) const {
    return static_cast<char*>(op.routing_map) + static_cast<uint64_t>(first) * map_row_bytes(op);
  }
  __device__ __forceinline__ void write_probs(unsigned first, unsigned count) const {
    copy_out(probs, probs_row(first), count * columns() * element_size());
  }
  __device__ __forceinline__ void write_map(unsigned first, unsigned count) const {
    copy_out(map, map_row(first), count * map_row_bytes(op));
  }
};

}  // namespace anabranch::cuda
