#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants biased_variants_of_4() { return variants<Mode::biased, float>(); }

}  // namespace anabranch::cuda
