// Variants that select by logits.
#include "router/cuda/forward.cuh"

namespace anabranch::cuda {

RouteVariants softmax_variants() { return variants<Mode::softmax>(); }
RouteVariants elementwise_variants() { return variants<Mode::elementwise>(); }

}  // namespace anabranch::cuda
