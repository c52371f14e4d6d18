#include "router/cuda/forward.cuh"

namespace anabranch::cuda {

// Fewer variants suffice with quantile balancing: a list also serves shorter ones, and a single lane has no list that
// is long enough. Two lanes of 32 experts take 1.1 to 1.6 times as long as four.
RouteVariants balanced_variants() {
  constexpr Mode kMode = Mode::balanced;
  constexpr RouteVariant none{};
  constexpr RouteVariant k1024 = variant<kMode, 32, 32, false, 16, 64>();
  return {{none, none, none, none, variant<kMode, 4, 32, false, 8, 16>(), variant<kMode, 8, 32, false, 8, 32>(),
           variant<kMode, 8, 48, false, 8>(), variant<kMode, 16, 32, false, 8, 16, 32>(), k1024},
          {none, none, none, variant<kMode, 32, 8, false, 8, 32>(), variant<kMode, 32, 16, false, 32>(), k1024}};
}

}  // namespace anabranch::cuda
