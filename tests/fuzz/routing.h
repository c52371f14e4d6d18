// What rounding may decide in a router's forward pass.
#pragma once

#include <string>

#include "anabranch/router.h"
#include "call.h"

namespace anabranch::fuzz {

// Whether two backends may select different experts for some token: the keys of two experts, or the scores of two
// groups, differ by no more than rounding (docs/semantics.md, Order). Keys that are logits are exact.
bool selection_is_open(const ab_router_forward_args& args);

// What is wrong with a histogram of quantile balancing: the number of tokens in the bins up to some bin that rounding
// cannot explain. Empty: nothing.
std::string histogram_fault(const ab_router_forward_args& args, const char* histogram);

// The lse of rows of logits.
void fill_lse(const Operand& logits, char* lse);

}  // namespace anabranch::fuzz
