// All checks of the calls of the router.
#pragma once

#include "router/backward.h"
#include "router/forward.h"

namespace anabranch {

ab_status check_router_forward(const ab_router_forward_args* args, RouterForward* op);
ab_status check_router_backward(const ab_router_backward_args* args, RouterBackward* op);

}  // namespace anabranch
