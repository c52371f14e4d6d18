// The effects that rounding may have on a router's forward pass.
#pragma once

#include <string>

#include "anabranch/router.h"
#include "call.h"

namespace anabranch::fuzz {

// Whether two backends may select different experts for some token, because the keys of two experts or the scores of
// two groups differ by no more than rounding (docs/semantics.md, Order). Keys that are logits are exact.
bool selection_is_open(const ab_router_forward_args& args);

// Describes the first cumulative count of a quantile-balancing histogram that rounding cannot explain; empty if there
// is none.
std::string histogram_fault(const ab_router_forward_args& args, const char* histogram);

// Computes the logsumexp of each row of logits.
void fill_lse(const Operand& logits, char* lse);

}  // namespace anabranch::fuzz
