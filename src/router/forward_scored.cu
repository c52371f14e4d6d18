#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants scored_variants() { return variants<Mode::scored>(); }

}  // namespace anabranch::cuda
