#include "router/forward.cuh"

namespace anabranch::cuda {

RouteVariants sqrtsoftplus_variants() { return variants<AB_SQRTSOFTPLUS>(); }

}  // namespace anabranch::cuda
