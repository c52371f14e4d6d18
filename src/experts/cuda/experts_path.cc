// ab_cuda_experts_path: which kernels the experts of a layer run on, and why not on those before.
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "anabranch/cuda.h"
#include "experts/cuda/path.h"

namespace anabranch::cuda {
namespace {

// The products of a layer's experts, all of whose operands have one dtype and begin at aligned addresses. What the
// paths take depends on addresses and sizes, never on what stands there.
struct Products {
  FfnSizes s;
  Floats any;
  RowMap map;

  Products(const FfnSizes& sizes, int32_t dtype)
      : s(sizes),
        any(aligned(), dtype),
        map(static_cast<const int32_t*>(aligned()), s.slots(), std::max<int64_t>(s.K, 1)) {}

  static void* aligned() { return reinterpret_cast<void*>(uintptr_t{4096}); }

  Up up() const {
    Up up;
    up.s = s;
    up.map = map;
    up.x = up.w_in = up.b_in = up.h = up.a = any;
    return up;
  }

  HiddenGradient hidden() const {
    HiddenGradient hidden;
    hidden.s = s;
    hidden.map = map;
    hidden.d_y = hidden.w_out = hidden.h = hidden.dh = hidden.weighted_a = any;
    return hidden;
  }

  RowsProduct rows(int64_t D, int64_t N) const {
    return {.x = any.data,
            .w = any.data,
            .y = any.data,
            .map = map,
            .dtype = any.dtype,
            .R = s.R,
            .E = s.E,
            .D = D,
            .N = N};
  }

  WeightGradient weights(int64_t D, int64_t N) const {
    WeightGradient gradient;
    gradient.map = map;
    gradient.x = gradient.d_y = gradient.d_w = any;
    gradient.gathers_x = true;
    gradient.R = s.R;
    gradient.E = s.E;
    gradient.D = D;
    gradient.N = N;
    return gradient;
  }

  // The last path that a product takes.
  ab_status choose(const Device& device, PathChoice* last) const {
    *last = {Path::hopper};
    const auto add = [&](const auto&... operations) -> ab_status {
      for (const ab_status& status : {add_one(operations, device, last)...}) AB_RETURN_IF_ERROR(status);
      return ok();
    };
    return add(up(), rows(s.F, s.D), hidden(), weights(s.F, s.D), weights(s.D, s.P * s.F), rows(s.P * s.F, s.D));
  }

  template <class Operation>
  static ab_status add_one(const Operation& operation, const Device& device, PathChoice* last) {
    const PathChoice choice = choose_path(operation, device);
    if (choice.path == Path::hopper) return ok();
    *last = choice;
    return portable::check(operation);
  }
};

ab_status check_sizes(int32_t dtype, const FfnSizes& s) {
  constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;  // of one: products of two are far from overflow
  if (dtype != AB_FLOAT32 && dtype != AB_BFLOAT16 && dtype != AB_FLOAT16) {
    return AB_INVALID("dtype: got ab_dtype %d, expected float16, bfloat16 or float32", dtype);
  }
  const std::initializer_list<std::pair<const char*, int64_t>> sizes = {
      {"T", s.T}, {"K", s.K}, {"E", s.E}, {"D", s.D}, {"F", s.F}};
  for (const auto& [name, size] : sizes) {
    if (size >= 0 && size <= kMostSize) continue;
    return AB_INVALID("%s: got %lld, expected 0 to 2^31 - 1", name, static_cast<long long>(size));
  }
  if (s.P != 1 && s.P != 2) return AB_INVALID("P: got %lld, expected 1 or 2", static_cast<long long>(s.P));
  if (s.slots() <= kMostSize) return ok();
  return AB_INVALID("T: got %lld with K = %lld, expected T K < 2^31", static_cast<long long>(s.T),
                    static_cast<long long>(s.K));
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_experts_path(int32_t dtype, int64_t T, int64_t K, int64_t E, int64_t D, int64_t P,
                                          int64_t F, const char** path, const char** why_not) {
  if (path == nullptr) return AB_INVALID("path: got NULL, expected room for a name");
  FfnSizes s;
  s.T = T;
  s.K = K;
  s.E = E;
  s.D = D;
  s.P = P;
  s.F = F;
  AB_RETURN_IF_ERROR(cuda::check_sizes(dtype, s));
  s.R = s.slots();
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("experts_path", &device));
  cuda::PathChoice choice;
  AB_RETURN_IF_ERROR(cuda::Products(s, dtype).choose(device, &choice));
  *path = cuda::name_of(choice.path);
  if (why_not != nullptr) *why_not = choice.why_not_hopper;
  return ok();
}
