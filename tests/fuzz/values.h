// Reads tensor elements as double.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "anabranch/types.h"

namespace anabranch::fuzz {

template <class T>
T read(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

inline double value_of(const char* at, int32_t dtype) {
  switch (dtype) {
    case AB_FLOAT32: return read<float>(at);
    case AB_BFLOAT16: return __builtin_bit_cast(float, static_cast<uint32_t>(read<uint16_t>(at)) << 16);
    case AB_FLOAT16: return static_cast<double>(static_cast<float>(read<_Float16>(at)));
    case AB_INT64: return static_cast<double>(read<int64_t>(at));
    case AB_INT32: return read<int32_t>(at);
    case AB_INT16: return read<int16_t>(at);
    default: return static_cast<unsigned char>(*at);
  }
}

}  // namespace anabranch::fuzz
