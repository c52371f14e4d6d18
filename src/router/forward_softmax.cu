#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants softmax_variants() { return variants<AB_SOFTMAX>(); }

}  // namespace anabranch::cuda
