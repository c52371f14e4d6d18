#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants elementwise_variants_of_2() { return variants<Mode::elementwise, uint16_t>(); }

}  // namespace anabranch::cuda
