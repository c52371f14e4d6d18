#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

namespace anabranch::fuzz {
namespace {

bool is_float(int32_t dtype) { return dtype == AB_FLOAT32 || dtype == AB_BFLOAT16 || dtype == AB_FLOAT16; }

double value_of(const char* at, int32_t dtype) {
  switch (dtype) {
    case AB_FLOAT32: {
      float value = 0;
      std::memcpy(&value, at, sizeof(value));
      return value;
    }
    case AB_BFLOAT16: {
      float value = 0;
      std::memcpy(reinterpret_cast<char*>(&value) + 2, at, 2);
      return value;
    }
    case AB_FLOAT16: {
      _Float16 value = 0;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(static_cast<float>(value));
    }
    case AB_INT64: {
      int64_t value = 0;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<double>(value);
    }
    case AB_INT32: {
      int32_t value = 0;
      std::memcpy(&value, at, sizeof(value));
      return value;
    }
    case AB_INT16: {
      int16_t value = 0;
      std::memcpy(&value, at, sizeof(value));
      return value;
    }
    default: return static_cast<unsigned char>(*at);
  }
}

bool has(const Call& call, int32_t dtype) {
  return std::any_of(call.operands.begin(), call.operands.end(),
                     [&](const Operand& operand) { return operand.is_given() && operand.view.dtype == dtype; });
}

bool is_tf32(const Call& call) {
  return std::any_of(call.options.begin(), call.options.end(), [](const auto& option) {
    return std::string_view(option.first) == "precision" && *option.second == 1;
  });
}

// Error bound of an element, relative to the largest of its tensor. It is 16 roundings for 16-bit dtypes and TF32, and
// some hundred for float32, because long sums have that many.
double tolerance(const Call& call) {
  if (has(call, AB_BFLOAT16)) return 0x1p-4;
  return has(call, AB_FLOAT16) || is_tf32(call) ? 0x1p-7 : 1e-4;
}

// Numbers that float16 can't hold are infinite on one side earlier than on the other.
bool overflows(const Call& call, double a, double b) {
  return has(call, AB_FLOAT16) && !(std::abs(a) < 3e4 && std::abs(b) < 3e4);
}

bool is_near(double a, double b, double bound) {
  return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= bound;
}

}  // namespace

std::string difference(const Call& call, const Results& got, const Results& want) {
  size_t i = 0;
  for (const Operand& operand : call.operands) {
    if (!operand.is_compared()) continue;
    const int32_t dtype = operand.view.dtype;
    const size_t size = element_size(dtype);
    const std::vector<char>& left = got[i];
    const std::vector<char>& right = want[i++];
    double largest = 0;
    for (size_t at = 0; at < right.size(); at += size) {
      const double value = std::abs(value_of(&right[at], dtype));
      if (std::isfinite(value)) largest = std::max(largest, value);
    }
    const double bound = is_float(dtype) ? tolerance(call) * largest + 1e-36 : 0;
    for (size_t at = 0; at < right.size(); at += size) {
      const double a = value_of(&left[at], dtype);
      const double b = value_of(&right[at], dtype);
      if (is_near(a, b, bound) || (is_float(dtype) && overflows(call, a, b))) continue;
      char text[200];
      std::snprintf(text, sizeof(text), ", element %zu: %.9g on one, %.9g on the other, largest %.9g", at / size, a, b,
                    largest);
      return operand.name + text;
    }
  }
  return "";
}

}  // namespace anabranch::fuzz
