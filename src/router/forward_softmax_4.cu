#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants softmax_variants_of_4() { return variants<Mode::softmax, float>(); }

}  // namespace anabranch::cuda
