// Comparison of the results of two backends.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace anabranch::fuzz {

using Results = std::vector<std::vector<char>>;

// Describes the first element that differs by more than rounding; empty if there is none. Integers, quantised numbers
// and operands marked exact must be equal. All NaNs are equal. Other floating-point numbers must be close.
std::string difference(const Call& call, const Results& got, const Results& want);

// Whether two runs of one backend gave the same bits. On an emulated GPU all NaNs are equal: GPU arithmetic produces
// one NaN bit pattern, the emulating CPU several.
bool are_same(const Call& call, const Results& first, const Results& second);

}  // namespace anabranch::fuzz
