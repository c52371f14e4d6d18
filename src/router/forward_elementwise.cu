#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants elementwise_variants() { return variants<Mode::elementwise>(); }

}  // namespace anabranch::cuda
