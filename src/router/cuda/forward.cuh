// The variants of the forward kernel `route` (route.cuh), which holds rows in registers. The table shows the benefit of
// each axis: the time of a call without it (one H200, bfloat16, T = 65536; ranges include T = 4096 and 8192).
//
//   axis                                     time without it
//   Mode: with and without a bias            calls without a bias take 1.2 to 2 times as long
//   width: 1 lane of 8 and of 16 experts     1.5 to 2.9 times as long at E = 8 and 16
//   width: 2 lanes of 32 experts             1.2 to 2.1 times as long at E = 64
//   width: 8 lanes of 48 experts             39 to 54% longer at E = 384
//   list: 4                                  5 to 36% longer at K = 2 and 4
//   list: 16                                 24 to 51% longer at K = 10 and 16
//   list: 32                                 1.1 to 2.5 times as long at E = 256 and 512
//   list: 64                                 1.2 to 1.6 times as long at E = 512
//   grouped kernels                          8 to 10 times as long at E = 128 with 4 groups, 3.7 to 11 above
//   kernels for few tokens                   T = 64: 9 to 31% longer above 256 experts, 1.2 to 5 times as long below
//   size of a logit, softmax                 2 to 6% longer
//   size of a logit, other score functions   3% longer, 1.6% with a bias; these kernels read the size at run time
#pragma once

#include "router/cuda/logit_size.cuh"
#include "router/cuda/route.cuh"

namespace anabranch::cuda {

// The kernels for rows of up to lanes * items experts, one per length of the list that holds the K best.
struct RouteVariant {
  using Kernels = KernelsBySize<RouteCall>;
  static constexpr int kLists = 5;  // 4, 8, 16, 32, 64
  static constexpr int list(int i) { return 4 << i; }
  static constexpr int kGrouped = 1;  // index of the list of `grouped`

  int lanes;
  int items;
  Kernels kernels[kLists];  // nullptr: no kernel
  int candidates[kLists];   // per token, 0 if lanes == 1
  Kernels grouped;          // K <= list(kGrouped), groups of whole numbers of lanes; nullptr: no kernel
};

// Variants in ascending order of width: for many tokens, and for few, where one warp per token does not fill the
// device.
struct RouteVariants {
  static constexpr int kMany = 9;
  static constexpr int kFew = 6;
  RouteVariant many[kMany];
  RouteVariant few[kFew];
};
RouteVariants softmax_variants();
RouteVariants elementwise_variants();
RouteVariants biased_variants();
RouteVariants balanced_variants();

namespace {

template <Mode kMode, int kLanes, int kItems, int kList, bool kGrouped>
constexpr RouteVariant::Kernels by_size() {
  constexpr auto any_size = route<kMode, 0, kLanes, kItems, kList, kGrouped>;
  if constexpr (kMode == Mode::softmax) {
    return {any_size, route<kMode, 2, kLanes, kItems, kList, kGrouped>,
            route<kMode, 4, kLanes, kItems, kList, kGrouped>};
  } else {
    return {any_size, any_size, any_size};
  }
}

template <Mode kMode, int kLanes, int kItems, int kList>
constexpr void add_list(RouteVariant* variant) {
  int i = 0;
  while (RouteVariant::list(i) < kList) ++i;
  variant->kernels[i] = by_size<kMode, kLanes, kItems, kList, false>();
  if constexpr (kLanes > 1) {
    static_assert(Filter<kLanes, kItems, kList>::kExists, "the filter has no list of this length for this width");
    variant->candidates[i] = Filter<kLanes, kItems, kList>::kCandidates;
  }
}

template <Mode kMode, int kLanes, int kItems, bool kGrouped, int... kListLengths>
constexpr RouteVariant variant() {
  RouteVariant v{kLanes, kItems, {}, {}, {}};
  (add_list<kMode, kLanes, kItems, kListLengths>(&v), ...);
  if constexpr (kGrouped)
    v.grouped = by_size<kMode, kLanes, kItems, RouteVariant::list(RouteVariant::kGrouped), true>();
  return v;
}

template <Mode kMode>
RouteVariants variants() {
  constexpr RouteVariant k8 = variant<kMode, 1, 8, false, 4, 8>();
  constexpr RouteVariant k16 = variant<kMode, 1, 16, false, 4, 8>();
  constexpr RouteVariant k32 = variant<kMode, 1, 32, false, 4, 8>();
  constexpr RouteVariant k1024 = variant<kMode, 32, 32, false, 8, 64>();
  return {{k8, k16, k32, variant<kMode, 2, 32, false, 8, 16>(), variant<kMode, 4, 32, true, 4, 8, 16>(),
           variant<kMode, 8, 32, true, 8, 16, 32>(), variant<kMode, 8, 48, false, 8>(),
           variant<kMode, 16, 32, true, 8, 16, 32, 64>(), k1024},
          {k8, k16, k32, variant<kMode, 32, 8, true, 8, 32>(), variant<kMode, 32, 16, false, 8, 32>(), k1024}};
}

}  // namespace
}  // namespace anabranch::cuda
