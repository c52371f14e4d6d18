// Results of one backend beside those of the other.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace anabranch::fuzz {

using Results = std::vector<std::vector<char>>;

// The first element that differs by more than rounding; empty: none. Integers, quantised numbers and what an operand
// calls exact must be equal, NaN is like any NaN, and other floating-point numbers must be near each other.
std::string difference(const Call& call, const Results& got, const Results& want);

// Whether the results of two runs of one backend are the same bits. On an emulated GPU any NaN is like any other: a GPU
// has one NaN for the results of its arithmetic, the CPU that emulates it has several.
bool are_same(const Call& call, const Results& first, const Results& second);

}  // namespace anabranch::fuzz
