#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants softmax_variants() { return variants<Mode::softmax>(); }

}  // namespace anabranch::cuda
