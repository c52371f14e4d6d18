#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants sigmoid_variants() { return variants<AB_SIGMOID>(); }

}  // namespace anabranch::cuda
