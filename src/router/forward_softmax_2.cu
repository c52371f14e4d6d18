#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants softmax_variants_of_2() { return variants<Mode::softmax, uint16_t>(); }

}  // namespace anabranch::cuda
