#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "values.h"

namespace anabranch::fuzz {
namespace {

bool is_float(int32_t dtype) { return dtype == AB_FLOAT32 || dtype == AB_BFLOAT16 || dtype == AB_FLOAT16; }

bool has(const Call& call, int32_t dtype) {
  return std::any_of(call.operands.begin(), call.operands.end(),
                     [&](const Operand& operand) { return operand.is_given() && operand.view.dtype == dtype; });
}

bool is_tf32(const Call& call) {
  return std::any_of(call.options.begin(), call.options.end(), [](const auto& option) {
    return std::string_view(option.first) == "precision" && *option.second == 1;
  });
}

// By how much an activation that saturates at its limit enlarges a relative error of h: values shrink with the limit,
// and slopes do not.
double conditioning(const Call& call) {
  for (const auto& [name, value] : call.numbers) {
    if (std::string_view(name) == "activation_limit" && *value > 0) return std::max(1.0, 1.0 / double{*value});
  }
  return 1.0;
}

// Error bound per element, relative to the largest element of its tensor or to the terms of its sums.
//
// GEMMs: 16 roundings for 16-bit dtypes and TF32; some hundred for float32, because long sums have that many.
// Operations that compute in float32 throughout: 128 roundings, for special functions and sums.
double tolerance(const Call& call) {
  if (call.in_float32) return 0x1p-17;
  const double rounding = has(call, AB_BFLOAT16) ? 0x1p-4 : has(call, AB_FLOAT16) || is_tf32(call) ? 0x1p-7 : 1e-4;
  return rounding * conditioning(call);
}

// Additional bound relative to the element: one unit in the last place where a float32 result is rounded to 16 bits.
double last_place(const Call& call, int32_t dtype) {
  if (!call.in_float32) return 0.0;
  return dtype == AB_BFLOAT16 ? 0x1p-7 : dtype == AB_FLOAT16 ? 0x1p-10 : 0.0;
}

// Near the float16 maximum one backend may overflow to infinity before the other.
bool overflows(const Call& call, double a, double b) {
  return has(call, AB_FLOAT16) && !(std::abs(a) < 3e4 && std::abs(b) < 3e4) && !std::isnan(a) && !std::isnan(b);
}

bool is_nan(const char* at, int32_t dtype) {
  return dtype == AB_FLOAT8_E4M3 ? (*at & 0x7f) == 0x7f : is_float(dtype) && std::isnan(value_of(at, dtype));
}

bool is_near(double a, double b, double bound) {
  return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= bound;
}

// Describes the first element that differs by more than the bound; empty if there is none.
std::string difference(const Call& call, const Operand& operand, const char* got, const char* want) {
  const int32_t dtype = operand.view.dtype;
  const size_t size = element_size(dtype);
  const size_t bytes =
      operand.content.empty() && operand.in != nullptr ? operand.in->content.size() : operand.content.size();
  double largest = operand.scale;
  for (size_t at = 0; at < bytes; at += size) {
    const double value = std::abs(value_of(want + at, dtype));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  const double bound = tolerance(call) * largest + (dtype == AB_FLOAT16 ? 0x1p-24 : 1e-36);
  for (size_t at = 0; at < bytes; at += size) {
    const double a = value_of(got + at, dtype);
    const double b = value_of(want + at, dtype);
    if (operand.exact || !is_float(dtype)) {
      const bool are_nan = is_nan(got + at, dtype) && is_nan(want + at, dtype);
      if (are_nan || std::memcmp(got + at, want + at, size) == 0) continue;
    } else if (is_near(a, b, bound + last_place(call, dtype) * std::abs(b)) || overflows(call, a, b)) {
      continue;
    }
    char text[200];
    std::snprintf(text, sizeof(text), ", element %zu: got %.9g, expected %.9g, bound %.3g", at / size, a, b, bound);
    return text;
  }
  return "";
}

bool are_same(int32_t dtype, const std::vector<char>& first, const std::vector<char>& second) {
  if (first == second || !kEmulated) return first == second;
  const size_t size = element_size(dtype);
  for (size_t at = 0; at < first.size(); at += size) {
    const bool are_nan = is_nan(&first[at], dtype) && is_nan(&second[at], dtype);
    if (!are_nan && std::memcmp(&first[at], &second[at], size) != 0) return false;
  }
  return true;
}

}  // namespace

bool are_same(const Call& call, const Results& first, const Results& second) {
  size_t i = 0;
  for (const Operand& operand : call.operands) {
    if (!operand.is_compared()) continue;
    if (!are_same(operand.view.dtype, first[i], second[i])) return false;
    ++i;
  }
  return true;
}

std::string difference(const Call& call, const Results& got, const Results& want) {
  if (call.is_open && call.is_open()) return "";
  size_t i = 0;
  for (const Operand& operand : call.operands) {
    if (!operand.is_compared()) continue;
    const char* const left = got[i].data();
    const char* const right = want[i++].data();
    if (call.is_extreme && !operand.exact) continue;
    std::string text;
    if (operand.fault) {
      text = operand.fault(left);
      if (text.empty()) text = operand.fault(right);
    } else {
      text = difference(call, operand, left, right);
    }
    if (!text.empty()) return operand.name + text;
  }
  return "";
}

}  // namespace anabranch::fuzz
