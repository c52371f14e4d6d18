// Rows of logits on their way through shared memory: a warp copies the rows of its next tokens while it works on those
// of the present ones, and every lane reads kItems neighbouring experts of one row.
//
// A row takes the place of kLanes * kItems experts, so that a lane finds its own at one place whatever E is. 16-byte
// chunk c stands at c ^ (c / 8 % 8): lanes that read their chunks at a stride of 2, 4 or 8 find them in different
// banks.
#pragma once

#include <cstdint>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"

namespace anabranch::cuda {

constexpr unsigned kChunk = 16;  // bytes

__device__ __forceinline__ unsigned chunk_place(unsigned chunk) { return chunk ^ (chunk / 8 % 8); }

// f(i, where it stands) for the kChunks chunks of 128-byte aligned memory that are the lane's.
template <unsigned kChunks, class F>
__device__ __forceinline__ void for_chunks(unsigned memory, unsigned lane, const F& f) {
  constexpr bool kAligned = (kChunks & (kChunks - 1)) == 0 && kChunks <= 8;  // a lane's differ in their last bits
  const unsigned chunk = lane * kChunks;
  const unsigned first = memory + chunk_place(chunk) * kChunk;
#pragma unroll
  for (unsigned i = 0; i < kChunks; ++i) {
    f(i, kAligned ? first ^ i * kChunk : memory + chunk_place(chunk + i) * kChunk);
  }
}

// Copies 16 bytes from global to shared memory without waiting.
__device__ __forceinline__ void copy_chunk_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Bits: float, or uint16_t for bfloat16 and, where `is_half`, float16.
template <class Bits, int kLanes, int kItems>
class StagedRows {
 public:
  static constexpr unsigned kOfChunk = kChunk / sizeof(Bits);
  static constexpr unsigned kLaneChunks = kItems / kOfChunk;
  static constexpr unsigned kRowChunks = kLanes * kLaneChunks;
  static constexpr unsigned kBytes = kWarp * kLaneChunks * kChunk;

  __device__ __forceinline__ StagedRows(unsigned address, unsigned E, bool aligned, bool is_half)
      : address_(address),
        E_(E),
        is_full_(aligned && E == kLanes * kItems),
        is_vector_(aligned && E % kOfChunk == 0),
        is_half_(is_half) {}

  __device__ __forceinline__ unsigned address() const { return address_; }
  __device__ __forceinline__ bool is_full() const { return is_full_; }

  // Begins to copy `count` rows that lie one behind another; ready after wait_for_copies() and __syncwarp().
  __device__ __forceinline__ void start(const char* from, unsigned count) const {
    const unsigned lane = lane_index();
    if (is_full_ && count == kWarp / kLanes) {
      from += lane * kChunk;
      const unsigned place = address_ + (lane ^ lane / 8) * kChunk;  // of chunk `lane`; the odd rounds' places differ
#pragma unroll
      for (unsigned i = 0; i < kLaneChunks; ++i) {
        copy_chunk_async((place ^ i % 2 * 4 * kChunk) + i * kWarp * kChunk, from + i * kWarp * kChunk);
      }
    } else {
#pragma unroll 1
      for (unsigned row = 0; row < count; ++row) copy_row(from + static_cast<size_t>(row) * E_ * sizeof(Bits), row);
    }
    end_copy_group();
  }

  __device__ __forceinline__ float logit(unsigned row, unsigned expert) const {
    const auto bits = load_shared<Bits>(element(row, expert));
    if constexpr (sizeof(Bits) == 4) {
      return bits;
    } else {
      return is_half_ ? to_float(Float16{bits}) : to_float(BFloat16{bits});
    }
  }

  // items[i] = expert first + i of the lane's row, first = lane % kLanes * kItems; -inf past the last expert.
  __device__ __forceinline__ void read(unsigned first, float (&items)[kItems]) const {
    uint4 chunks[kLaneChunks];
    for_chunks<kLaneChunks>(address_, lane_index(),
                            [&](unsigned i, unsigned at) { chunks[i] = load_shared<uint4>(at); });
    if (sizeof(Bits) == 4 || !is_half_) {
#pragma unroll
      for (unsigned i = 0; i < kLaneChunks; ++i) unpack<false>(chunks[i], items + i * kOfChunk);
    } else {
#pragma unroll
      for (unsigned i = 0; i < kLaneChunks; ++i) unpack<true>(chunks[i], items + i * kOfChunk);
    }
    if (first + kItems > E_) {
#pragma unroll
      for (unsigned i = 0; i < kItems; ++i) {
        if (first + i >= E_) items[i] = -INFINITY;
      }
    }
  }

  // The way back: rows are written in their places, and leave for global memory.
  __device__ __forceinline__ void write(const float (&items)[kItems]) const {
    const unsigned chunk = lane_index() * kLaneChunks;
#pragma unroll
    for (unsigned i = 0; i < kLaneChunks; ++i) {
      uint32_t words[4];
#pragma unroll
      for (unsigned w = 0; w < 4; ++w) {
        if constexpr (sizeof(Bits) == 4) {
          words[w] = __float_as_uint(items[i * 4 + w]);
        } else {
          words[w] = pack(items[i * 8 + 2 * w], items[i * 8 + 2 * w + 1]);
        }
      }
      store_shared(address_ + chunk_place(chunk + i) * kChunk, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (unsigned i = 0; i < kLaneChunks; ++i) store_shared(address_ + (i * kWarp + lane_index()) * kChunk, uint4{});
  }
  __device__ __forceinline__ Bits bits(unsigned row, unsigned expert) const {
    return load_shared<Bits>(element(row, expert));
  }
  __device__ __forceinline__ void set_bits(unsigned row, unsigned expert, Bits bits) const {
    store_shared(element(row, expert), bits);
  }
  __device__ __forceinline__ void set(unsigned row, unsigned expert, float value) const {
    if constexpr (sizeof(Bits) == 4) {
      set_bits(row, expert, value);
    } else {
      set_bits(row, expert, is_half_ ? from_float<Float16>(value).bits : from_float<BFloat16>(value).bits);
    }
  }
  // Copies `count` rows out, one behind another. to_aligned: rows begin at 16 bytes there as they do here.
  __device__ __forceinline__ void copy_out(char* to, unsigned count, bool to_aligned) const {
    const unsigned lane = lane_index();
    if (is_full_ && to_aligned && count == kWarp / kLanes) {
      const unsigned place = address_ + (lane ^ lane / 8) * kChunk;
      uint4 chunks[kLaneChunks];
#pragma unroll
      for (unsigned i = 0; i < kLaneChunks; ++i) {
        chunks[i] = load_shared<uint4>((place ^ i % 2 * 4 * kChunk) + i * kWarp * kChunk);
      }
#pragma unroll
      for (unsigned i = 0; i < kLaneChunks; ++i) {
        *reinterpret_cast<uint4*>(to + (i * kWarp + lane) * kChunk) = chunks[i];
      }
      return;
    }
#pragma unroll 1
    for (unsigned row = 0; row < count; ++row) {
      char* const out = to + static_cast<size_t>(row) * E_ * sizeof(Bits);
      if (to_aligned && is_vector_) {
#pragma unroll 1
        for (unsigned chunk = lane; chunk < E_ / kOfChunk; chunk += kWarp) {
          *reinterpret_cast<uint4*>(out + chunk * kChunk) =
              load_shared<uint4>(address_ + chunk_place(row * kRowChunks + chunk) * kChunk);
        }
      } else {
#pragma unroll 1
        for (unsigned e = lane; e < E_; e += kWarp) reinterpret_cast<Bits*>(out)[e] = bits(row, e);
      }
    }
  }

 private:
  // Two values as they are stored.
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    uint32_t word;
    if (is_half_) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
  }

  __device__ __forceinline__ unsigned element(unsigned row, unsigned expert) const {
    return address_ + chunk_place(row * kRowChunks + expert / kOfChunk) * kChunk + expert % kOfChunk * sizeof(Bits);
  }

  __device__ __forceinline__ void copy_row(const char* from, unsigned row) const {
    if (is_vector_) {
#pragma unroll 1
      for (unsigned chunk = lane_index(); chunk < E_ / kOfChunk; chunk += kWarp) {
        copy_chunk_async(address_ + chunk_place(row * kRowChunks + chunk) * kChunk, from + chunk * kChunk);
      }
    } else {
#pragma unroll 1
      for (unsigned e = lane_index(); e < E_; e += kWarp) {
        store_shared(element(row, e), reinterpret_cast<const Bits*>(from)[e]);
      }
    }
  }

  template <bool kIsHalf>
  static __device__ __forceinline__ void unpack(const uint4& chunk, float* to) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(Bits) == 4) {
        to[w] = __uint_as_float(words[w]);
      } else if constexpr (kIsHalf) {
        to[2 * w] = to_float(Float16{static_cast<uint16_t>(words[w] & 0xffffu)});
        to[2 * w + 1] = to_float(Float16{static_cast<uint16_t>(words[w] >> 16)});
      } else {
        to[2 * w] = __uint_as_float(words[w] << 16);
        to[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      }
    }
  }

  unsigned address_;  // a multiple of 128
  unsigned E_;
  bool is_full_;    // rows fill their places and are whole chunks in global memory
  bool is_vector_;  // whole chunks in global memory
  bool is_half_;
};

}  // namespace anabranch::cuda
