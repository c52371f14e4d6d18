// Stages rows of logits in shared memory: a warp copies the rows of its next tokens while it processes the current
// ones. Each lane reads kItems consecutive experts of one row.
//
// A row occupies the space of kLanes * kItems experts, so a lane's position does not depend on E. 16-byte chunk c is
// stored at c ^ (c / 8 % 8): lanes that read chunks at a stride of 2, 4 or 8 use different banks.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/access.cuh"
#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared_array.cuh"
#include "core/cuda/warp.cuh"

namespace anabranch::cuda {

constexpr unsigned kChunk = 16;  // bytes

__device__ __forceinline__ unsigned chunk_place(unsigned chunk) { return chunk ^ (chunk / 8 % 8); }

// Calls f(i, address) for the lane's kChunks chunks of 128-byte aligned memory.
template <unsigned kChunks, class F>
__device__ __forceinline__ void for_chunks(unsigned memory, unsigned lane, const F& f) {
  constexpr bool kAligned = (kChunks & (kChunks - 1)) == 0 && kChunks <= 8;  // a lane's chunks differ in the low bits
  const unsigned chunk = lane * kChunks;
  const unsigned first = memory + chunk_place(chunk) * kChunk;
#pragma unroll
  for (unsigned i = 0; i < kChunks; ++i) {
    f(i, kAligned ? first ^ i * kChunk : memory + chunk_place(chunk + i) * kChunk);
  }
}

// kSize: bytes of a logit; 0: determined by the dtype at run time, so that one kernel serves all.
template <int kLanes, int kItems, int kSize>
class StagedRows {
 public:
  __device__ __forceinline__ StagedRows(unsigned address, unsigned E, bool aligned, int32_t dtype)
      : address_(address),
        E_(E),
        is_float32_(dtype == AB_FLOAT32),
        is_half_(dtype == AB_FLOAT16),
        is_full_(aligned && E == kLanes * kItems),
        is_vector_(aligned && E * element_size() % kChunk == 0) {}

  __device__ __forceinline__ unsigned address() const { return address_; }
  // Returns rows of this form at another address.
  __device__ __forceinline__ StagedRows at(unsigned address) const {
    StagedRows rows = *this;
    rows.address_ = address;
    return rows;
  }
  __device__ __forceinline__ unsigned element_size() const { return is_float32() ? 4 : 2; }
  // Bytes of the rows that a warp stages at a time.
  __device__ __forceinline__ unsigned bytes() const { return kWarp * kItems * element_size(); }

  // Starts to copy `count` contiguous rows; they are ready after wait_for_copies() and __syncwarp().
  __device__ __forceinline__ void start(const char* from, unsigned count) const {
    const unsigned lane = lane_index();
    if (is_full_ && count == kWarp / kLanes) {
      from += lane * kChunk;
      const unsigned place =
          address_ + (lane ^ lane / 8) * kChunk;  // address of chunk `lane`; odd iterations flip a bit
      for_lane_chunks([&](unsigned i) {
        copy_async_16((place ^ i % 2 * 4 * kChunk) + i * kWarp * kChunk, from + i * kWarp * kChunk);
      });
    } else {
#pragma unroll 1
      for (unsigned row = 0; row < count; ++row) copy_row(from + static_cast<size_t>(row) * E_ * element_size(), row);
    }
    end_copy_group();
  }

  __device__ __forceinline__ float logit(unsigned row, unsigned expert) const {
    const unsigned at = element(row, expert);
    if (is_float32()) return load_shared<float>(at);
    const auto bits = load_shared<uint16_t>(at);
    return is_half_ ? to_float(Float16{bits}) : to_float(BFloat16{bits});
  }

  // items[i] = expert first + i of the lane's row, first = lane % kLanes * kItems; -inf past the last expert.
  __device__ __forceinline__ void read(unsigned first, float (&items)[kItems]) const {
    if (is_float32()) {
      for_chunks<kItems / 4>(address_, lane_index(), [&](unsigned i, unsigned at) {
        const auto chunk = load_shared<float4>(at);
        items[4 * i] = chunk.x;
        items[4 * i + 1] = chunk.y;
        items[4 * i + 2] = chunk.z;
        items[4 * i + 3] = chunk.w;
      });
    } else {
      uint4 chunks[kItems / 8];
      for_chunks<kItems / 8>(address_, lane_index(),
                             [&](unsigned i, unsigned at) { chunks[i] = load_shared<uint4>(at); });
      if (is_half_) {
        unpack<Float16>(chunks, items);
      } else {
        unpack<BFloat16>(chunks, items);
      }
    }
    if (first + kItems > E_) {
#pragma unroll
      for (unsigned i = 0; i < kItems; ++i) {
        if (first + i >= E_) items[i] = -INFINITY;
      }
    }
  }

  // Writes the lane's items to its row in shared memory.
  __device__ __forceinline__ void write(const float (&items)[kItems]) const {
    if (is_float32()) {
      for_chunks<kItems / 4>(address_, lane_index(), [&](unsigned i, unsigned at) {
        store_shared(at, make_float4(items[4 * i], items[4 * i + 1], items[4 * i + 2], items[4 * i + 3]));
      });
    } else if (is_half_) {
      write_pairs<Float16>(items);
    } else {
      write_pairs<BFloat16>(items);
    }
  }
  __device__ __forceinline__ void clear() const {
    for_lane_chunks([&](unsigned i) { store_shared(address_ + (i * kWarp + lane_index()) * kChunk, uint4{}); });
  }
  // The bits of an element, zero-extended.
  __device__ __forceinline__ unsigned bits(unsigned row, unsigned expert) const {
    const unsigned at = element(row, expert);
    return is_float32() ? load_shared<uint32_t>(at) : load_shared<uint16_t>(at);
  }
  __device__ __forceinline__ void set_bits(unsigned row, unsigned expert, unsigned bits) const {
    const unsigned at = element(row, expert);
    if (is_float32()) {
      store_shared(at, bits);
    } else {
      store_shared(at, static_cast<uint16_t>(bits));
    }
  }
  __device__ __forceinline__ void set(unsigned row, unsigned expert, float value) const {
    set_bits(row, expert,
             is_float32() ? __float_as_uint(value)
             : is_half_   ? from_float<Float16>(value).bits
                          : from_float<BFloat16>(value).bits);
  }
  // Copies `count` rows to contiguous global memory. to_aligned: `to` is 16-byte aligned.
  __device__ __forceinline__ void copy_out(char* to, unsigned count, bool to_aligned) const {
    const unsigned lane = lane_index();
    if (is_full_ && to_aligned && count == kWarp / kLanes) {
      const unsigned place = address_ + (lane ^ lane / 8) * kChunk;
      const auto copy_chunks = [&](unsigned first) {
        uint4 chunks[kItems / 8];
#pragma unroll
        for (unsigned i = 0; i < kItems / 8; ++i) {
          chunks[i] = load_shared<uint4>((place ^ (first + i) % 2 * 4 * kChunk) + (first + i) * kWarp * kChunk);
        }
#pragma unroll
        for (unsigned i = 0; i < kItems / 8; ++i) {
          *reinterpret_cast<uint4*>(to + ((first + i) * kWarp + lane) * kChunk) = chunks[i];
        }
      };
      copy_chunks(0);
      if (is_float32()) copy_chunks(kItems / 8);
      return;
    }
    const unsigned size = element_size();
#pragma unroll 1
    for (unsigned row = 0; row < count; ++row) {
      char* const out = to + static_cast<size_t>(row) * E_ * size;
      if (is_vector_ && to_aligned) {
#pragma unroll 1
        for (unsigned chunk = lane; chunk < E_ * size / kChunk; chunk += kWarp) {
          *reinterpret_cast<uint4*>(out + chunk * kChunk) = load_shared<uint4>(chunk_address(row, chunk));
        }
      } else {
#pragma unroll 1
        for (unsigned e = lane; e < E_; e += kWarp) {
          if (is_float32()) {
            reinterpret_cast<uint32_t*>(out)[e] = bits(row, e);
          } else {
            reinterpret_cast<uint16_t*>(out)[e] = static_cast<uint16_t>(bits(row, e));
          }
        }
      }
    }
  }

  // The same for float32 rows, rounded to T, a 16-bit dtype.
  template <class T>
  __device__ __forceinline__ void copy_out_rounded(char* to, unsigned count, bool to_aligned) const {
    constexpr unsigned kChunkItems = 4;
    const bool in_chunks = to_aligned && E_ % kChunkItems == 0;
#pragma unroll 1
    for (unsigned row = 0; row < count; ++row) {
      auto* const out = reinterpret_cast<T*>(to) + static_cast<size_t>(row) * E_;
      if (in_chunks) {
#pragma unroll 1
        for (unsigned chunk = lane_index(); chunk < E_ / kChunkItems; chunk += kWarp) {
          const auto items = load_shared<float4>(chunk_address(row, chunk));
          *reinterpret_cast<uint2*>(out + chunk * kChunkItems) =
              uint2{pack<T>(items.x, items.y), pack<T>(items.z, items.w)};
        }
      } else {
#pragma unroll 1
        for (unsigned e = lane_index(); e < E_; e += kWarp) out[e] = from_float<T>(__uint_as_float(bits(row, e)));
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_float32() const { return kSize == 0 ? is_float32_ : kSize == 4; }

  // Calls f(i) for the chunks of full rows, one chunk per lane of the warp at a time.
  template <class F>
  __device__ __forceinline__ void for_lane_chunks(const F& f) const {
#pragma unroll
    for (unsigned i = 0; i < kItems / 8; ++i) f(i);
    if (is_float32()) {
#pragma unroll
      for (unsigned i = kItems / 8; i < kItems / 4; ++i) f(i);
    }
  }

  __device__ __forceinline__ unsigned chunk_address(unsigned row, unsigned chunk) const {
    return address_ + chunk_place(row * kLanes * (kItems / 8) * (is_float32() ? 2 : 1) + chunk) * kChunk;
  }
  __device__ __forceinline__ unsigned element(unsigned row, unsigned expert) const {
    const unsigned place = (row * kLanes * kItems + expert) * element_size();
    return address_ + chunk_place(place / kChunk) * kChunk + place % kChunk;
  }

  __device__ __forceinline__ void copy_row(const char* from, unsigned row) const {
    if (is_vector_) {
#pragma unroll 1
      for (unsigned chunk = lane_index(); chunk < E_ * element_size() / kChunk; chunk += kWarp) {
        copy_async_16(chunk_address(row, chunk), from + chunk * kChunk);
      }
    } else {
#pragma unroll 1
      for (unsigned e = lane_index(); e < E_; e += kWarp) {
        set_bits(
            row, e,
            is_float32() ? reinterpret_cast<const uint32_t*>(from)[e] : reinterpret_cast<const uint16_t*>(from)[e]);
      }
    }
  }

  template <class T>
  static __device__ __forceinline__ void unpack(const uint4 (&chunks)[kItems / 8], float (&items)[kItems]) {
#pragma unroll
    for (int i = 0; i < kItems / 8; ++i) {
      const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        items[8 * i + 2 * w] = low_half<T>(words[w]);
        items[8 * i + 2 * w + 1] = high_half<T>(words[w]);
      }
    }
  }
  template <class T>
  __device__ __forceinline__ void write_pairs(const float (&items)[kItems]) const {
    for_chunks<kItems / 8>(address_, lane_index(), [&](unsigned i, unsigned at) {
      const float* values = items + 8 * i;
      store_shared(at, make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                                  pack<T>(values[4], values[5]), pack<T>(values[6], values[7])));
    });
  }

  unsigned address_;  // a multiple of 128
  unsigned E_;
  bool is_float32_;  // read only if kSize is 0
  bool is_half_;
  bool is_full_;    // rows fill their space and are whole chunks in global memory
  bool is_vector_;  // rows are whole chunks in global memory
};

}  // namespace anabranch::cuda
