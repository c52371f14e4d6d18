// Results of one backend beside those of the other.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace anabranch::fuzz {

using Results = std::vector<std::vector<char>>;

// The first element that differs by more than rounding; empty: none. Integers and quantised numbers must be equal,
// floating-point numbers near each other for the coarsest dtype of the call.
std::string difference(const Call& call, const Results& got, const Results& want);

}  // namespace anabranch::fuzz
