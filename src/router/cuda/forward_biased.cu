#include "router/cuda/forward.cuh"

namespace anabranch::cuda {

RouteVariants biased_variants() { return variants<Mode::biased>(); }

}  // namespace anabranch::cuda
