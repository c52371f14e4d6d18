// Shared device code of the quantisers: 8 adjacent elements per thread, and quotients that equal the CPU's bit for bit.
#pragma once

#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/fp8.cuh"

namespace anabranch::cuda {

constexpr int kNeighbours = 8;  // elements per thread
constexpr int kNeighbourLanes = static_cast<int>(kScaleBlock) / kNeighbours;
constexpr int kQuantizeThreads = 256;

// 8 elements in their dtype in memory.
template <class T>
class Neighbours {
  static constexpr int kAccessElements = kAccessBytes / static_cast<int>(sizeof(T));

 public:
  // Loads contiguous, aligned elements.
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors_[i].load_if(true, from + i * kAccessElements);
  }
  __device__ __forceinline__ void load(const T* from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float values[kAccessElements];
#pragma unroll
      for (int j = 0; j < kAccessElements; ++j) values[j] = to_float(from[(i * kAccessElements + j) * stride]);
      vectors_[i] = Vector<T, kAccessElements>::from(values);
    }
  }
  // Loads every other one of 16 contiguous, aligned elements, starting at the first or the second.
  __device__ __forceinline__ void load_alternate(const T* from, bool second) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Vector<T, kAccessElements> pairs[2];
      pairs[0].load_if(true, from + 2 * i * kAccessElements);
      pairs[1].load_if(true, from + (2 * i + 1) * kAccessElements);
      vectors_[i] = chosen(pairs, second);
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return vectors_[i / kAccessElements][i % kAccessElements];
  }

  __device__ __forceinline__ uint32_t largest() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) largest = max(largest, magnitude_bits((*this)[i]));
    return largest;
  }

 private:
  static constexpr int kVectors = kNeighbours / kAccessElements;

  static __device__ __forceinline__ Vector<T, kAccessElements> chosen(const Vector<T, kAccessElements> (&pairs)[2],
                                                                      bool second) {
    if constexpr (sizeof(T) == 2) {
      uint32_t words[kAccessElements / 2];
#pragma unroll
      for (int i = 0; i < kAccessElements / 2; ++i) {
        const Vector<T, kAccessElements>& from = pairs[4 * i / kAccessElements];
        const int first = 2 * i % (kAccessElements / 2);
        words[i] = __byte_perm(from.word(first), from.word(first + 1), second ? 0x7632 : 0x5410);
      }
      return Vector<T, kAccessElements>::from_words(words);
    } else {
      float values[kAccessElements];
#pragma unroll
      for (int i = 0; i < kAccessElements; ++i) {
        const Vector<T, kAccessElements>& from = pairs[2 * i / kAccessElements];
        const int first = 2 * i % kAccessElements;
        values[i] = second ? from[first + 1] : from[first];
      }
      return Vector<T, kAccessElements>::from(values);
    }
  }

  Vector<T, kAccessElements> vectors_[kVectors];
};

// Computes v / scale, correctly rounded, for many v: multiplies by the reciprocal, then corrects twice by the
// remainder.
class Fp8Divider {
 public:
  __device__ __forceinline__ explicit Fp8Divider(float scale)
      : scale_(scale), inverse_(1.0f / scale), divides_(scale < kMinScale) {}

  __device__ __forceinline__ float scale() const { return scale_; }

  __device__ __forceinline__ float quotient(float v) const {
    if (divides_) return v / scale_;
    float q = v * inverse_;
#pragma unroll
    for (int i = 0; i < 2; ++i) q = fmaf(fmaf(-q, scale_, v), inverse_, q);
    return copysignf(q, v);  // the corrections lose the sign of zeros
  }

  template <class T>
  __device__ __forceinline__ uint2 pack(const Neighbours<T>& of) const {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = pack_fp8(quotient(of[4 * i]), quotient(of[4 * i + 1])) |
                 pack_fp8(quotient(of[4 * i + 2]), quotient(of[4 * i + 3])) << 16;
    }
    return {words[0], words[1]};
  }

 private:
  // For smaller scales, the remainder of a quotient that does not round to 0 may need bits below the smallest float.
  static constexpr float kMinScale = 0x1p-90f;

  float scale_;
  float inverse_;
  bool divides_;
};

template <bool kWhole>
__device__ __forceinline__ void store_neighbours(uint8_t* to, uint2 bytes) {
  if constexpr (kWhole) {
    *reinterpret_cast<uint2*>(to) = bytes;
  } else {
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8);
  }
}

}  // namespace anabranch::cuda
