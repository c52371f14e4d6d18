// core/cuda/access.cuh on the emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace anabranch::cuda {

template <class Word>
void load_if(bool condition, const Word* from, Word* word) {
  if (condition) *word = *from;
}
template <int kBytes>
void load_if(bool condition, const char* from, uint32_t* number) {
  if (!condition) return;
  *number = 0;
  std::memcpy(number, from, kBytes);
}
inline uint4 load_streaming(const uint4* from) { return *from; }
inline void load_streaming_if(bool condition, const void* from, uint4* word) {
  if (condition) std::memcpy(word, from, sizeof(*word));
}
template <class Word>
void store_if(bool condition, Word* to, const Word& word) {
  if (condition) *to = word;
}
inline void prefetch_if(bool, const void*) {}
template <class Word>
void forget(Word*) {}

template <class T>
uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
float low_half(uint32_t word) {
  return to_float(T{static_cast<uint16_t>(word)});
}
template <class T>
float high_half(uint32_t word) {
  return to_float(T{static_cast<uint16_t>(word >> 16)});
}

}  // namespace anabranch::cuda
