#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants elementwise_variants_of_4() { return variants<Mode::elementwise, float>(); }

}  // namespace anabranch::cuda
