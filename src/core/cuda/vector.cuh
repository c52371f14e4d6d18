// Vectors of up to 16 contiguous bytes of an array, loaded or stored by one access.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "core/cuda/access.cuh"
#include "core/dtype.h"

namespace anabranch::cuda {

constexpr int kAccessBytes = 16;

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// The bytes of one access, for code that does not interpret them.
template <int kBytes>
using Word = typename WordOf<kBytes>::type;

template <class T>
constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// N elements, aligned to their total size. Stored as in memory; elements are converted when they are read.
template <class T, int N>
struct Vector {
  using Bytes = Word<N * sizeof(T)>;
  Bytes bytes;

  __device__ __forceinline__ void load(const T* from) { bytes = __ldcs(reinterpret_cast<const Bytes*>(from)); }
  __device__ __forceinline__ void load_if(bool there, const T* from) {
    cuda::load_if(there, reinterpret_cast<const Bytes*>(from), &bytes);
  }
  __device__ __forceinline__ void store_if(bool there, T* to) const {
    cuda::store_if(there, reinterpret_cast<Bytes*>(to), bytes);
  }
  __device__ __forceinline__ void forget() { cuda::forget(&bytes); }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (N == 1) {
      return to_float(__builtin_bit_cast(T, bytes));
    } else if constexpr (sizeof(T) == 4) {
      return float_from_bits(part(bytes, i));
    } else {
      return i % 2 == 0 ? low_half<T>(part(bytes, i / 2)) : high_half<T>(part(bytes, i / 2));
    }
  }

  __device__ __forceinline__ static Vector from(const float (&values)[N]) {
    Vector result;
    if constexpr (N == 1) {
      result.bytes = __builtin_bit_cast(Bytes, from_float<T>(values[0]));
    } else {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Bytes)) / 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          part(result.bytes, i) = bits_of(values[i]);
        } else {
          part(result.bytes, i) = pack<T>(values[2 * i], values[2 * i + 1]);
        }
      }
    }
    return result;
  }

  // The i-th pair of 16-bit elements.
  __device__ __forceinline__ uint32_t word(int i) const {
    static_assert(sizeof(T) == 2 && sizeof(Bytes) >= 8, "a word holds two 16-bit elements");
    Bytes all = bytes;
    return part(all, i);
  }
  __device__ __forceinline__ static Vector from_words(const uint32_t (&words)[N / 2]) {
    static_assert(sizeof(T) == 2 && sizeof(Bytes) >= 8, "a word holds two 16-bit elements");
    Vector result;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) part(result.bytes, i) = words[i];
    return result;
  }

  // This vector if the condition holds, else zeros.
  __device__ __forceinline__ Vector or_zeros(bool condition) const {
    static_assert(sizeof(Bytes) >= 8, "the vector consists of 32-bit words");
    Vector result;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Bytes)) / 4; ++i) {
      Bytes all = bytes;
      part(result.bytes, i) = condition ? part(all, i) : 0u;
    }
    return result;
  }

 private:
  // The i-th 4 bytes of 8 or 16.
  template <class AnyBytes>
  __device__ __forceinline__ static auto& part(AnyBytes& bytes, int i) {
    if constexpr (sizeof(Bytes) == 8) {
      return i == 0 ? bytes.x : bytes.y;
    } else {
      return i == 0 ? bytes.x : i == 1 ? bytes.y : i == 2 ? bytes.z : bytes.w;
    }
  }
};

// The largest power of two, up to 16, that divides all of the addresses and sizes.
inline int common_alignment(std::initializer_list<uintptr_t> values) {
  uintptr_t bits = kAccessBytes;
  for (const uintptr_t value : values) bits |= value;
  return static_cast<int>(bits & -bits);
}
inline uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Calls f(Word<bytes>{}) for an alignment of 1 to 16 bytes.
template <class F>
auto with_word(int bytes, F&& f) {
  switch (bytes) {
    case 1: return f(Word<1>{});
    case 2: return f(Word<2>{});
    case 4: return f(Word<4>{});
    case 8: return f(Word<8>{});
    default: return f(Word<16>{});
  }
}

}  // namespace anabranch::cuda
