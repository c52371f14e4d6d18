#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants biased_variants_of_2() { return variants<Mode::biased, uint16_t>(); }

}  // namespace anabranch::cuda
