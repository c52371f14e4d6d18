// ab_cuda_experts_path: reports which kernels run the experts of a layer.
#include <algorithm>
#include <initializer_list>
#include <utility>

#include "anabranch/cuda.h"
#include "experts/cuda/path.h"
#include "experts/few_rows/products.h"

namespace anabranch::cuda {
namespace {

// The kernels that run a layer's GEMMs.
struct UsedPaths {
  bool few_rows = false;
  bool hopper = false;
  bool portable = false;
  const char* hopper_unsupported_reason = nullptr;  // set if the sm80 kernels run

  const char* names() const {
    static constexpr const char* kNames[2][2][2] = {
        {{"", "portable"}, {"hopper", "hopper+portable"}},
        {{"few_rows", "few_rows+portable"}, {"few_rows+hopper", "few_rows+hopper+portable"}}};
    return kNames[few_rows][hopper][portable];
  }
};

// The GEMMs of a layer's experts, with operands of one dtype at aligned addresses. Path choice depends only on
// addresses and sizes; no operand is read.
struct Products {
  FfnSizes s;
  Floats any;
  RowMap map;

  Products(const FfnSizes& sizes, int32_t dtype)
      : s(sizes),
        any(aligned(), dtype),
        map(static_cast<const int32_t*>(aligned()), s.slots(), std::max<int64_t>(s.K, 1)) {}

  static void* aligned() {
    alignas(256) static char nothing[16];
    return nothing;
  }

  Up up() const {
    Up up;
    up.s = s;
    up.map = map;
    up.x = up.w_in = up.b_in = up.h = up.a = any;
    return up;
  }

  IntermediateGradient intermediate_gradient() const {
    IntermediateGradient gradient;
    gradient.s = s;
    gradient.map = map;
    gradient.d_y = gradient.w_out = gradient.h = gradient.dh = gradient.weighted_a = any;
    return gradient;
  }

  RowsProduct rows(int64_t D, int64_t N, bool transposed) const {
    return {.x = any.data,
            .w = any.data,
            .transposed = transposed,
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

  ab_status find(bool backward, const Device& device, UsedPaths* used) const {
    AB_RETURN_IF_ERROR(add(up(), device, used));
    AB_RETURN_IF_ERROR(add(rows(s.F, s.D, s.layout.out_transposed), device, used));
    if (!backward) return ok();
    AB_RETURN_IF_ERROR(add(intermediate_gradient(), device, used));
    AB_RETURN_IF_ERROR(add(weights(s.F, s.D), device, used));
    AB_RETURN_IF_ERROR(add(weights(s.D, s.P * s.F), device, used));
    return add(rows(s.P * s.F, s.D, !s.layout.in_transposed), device, used);
  }

  template <class Operation>
  static ab_status add(const Operation& operation, const Device& device, UsedPaths* used) {
    if constexpr (requires { few_rows::supports(operation); }) {
      if (few_rows::supports(operation)) {
        used->few_rows = true;
        return ok();
      }
    }
    const PathChoice choice = choose_path(operation, device);
    if (choice.path == Path::hopper) {
      used->hopper = true;
      return ok();
    }
    used->portable = true;
    used->hopper_unsupported_reason = choice.hopper_unsupported_reason;
    return portable::check(operation);
  }
};

ab_status check_sizes(int32_t dtype, const FfnSizes& s) {
  constexpr int64_t kMaxSize = (int64_t{1} << 31) - 1;  // per size: products of two sizes cannot overflow
  if (dtype != AB_FLOAT32 && dtype != AB_BFLOAT16 && dtype != AB_FLOAT16) {
    return AB_INVALID("dtype: got ab_dtype %d, expected float16, bfloat16 or float32", dtype);
  }
  const std::initializer_list<std::pair<const char*, int64_t>> sizes = {
      {"T", s.T}, {"K", s.K}, {"E", s.E}, {"D", s.D}, {"F", s.F}};
  for (const auto& [name, size] : sizes) {
    if (size >= 0 && size <= kMaxSize) continue;
    return AB_INVALID("%s: got %lld, expected 0 to 2^31 - 1", name, static_cast<long long>(size));
  }
  if (s.P != 1 && s.P != 2) return AB_INVALID("P: got %lld, expected 1 or 2", static_cast<long long>(s.P));
  if (s.slots() <= kMaxSize) return ok();
  return AB_INVALID("T: got %lld with K = %lld, expected T K < 2^31", static_cast<long long>(s.T),
                    static_cast<long long>(s.K));
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_experts_path(int32_t dtype, int64_t T, int64_t K, int64_t E, int64_t D, int64_t P,
                                          int64_t F, int32_t w_in_transposed, int32_t w_out_transposed,
                                          int32_t backward, const char** path, const char** unsupported_reason) {
  if (path == nullptr) return AB_INVALID("path: got NULL, expected a pointer for the name");
  FfnSizes s;
  s.T = T;
  s.K = K;
  s.E = E;
  s.D = D;
  s.P = P;
  s.F = F;
  s.layout.in_transposed = w_in_transposed != 0;
  s.layout.out_transposed = w_out_transposed != 0;
  AB_RETURN_IF_ERROR(cuda::check_sizes(dtype, s));
  for (const auto& [name, flag] : {std::pair{"w_in_transposed", w_in_transposed},
                                   {"w_out_transposed", w_out_transposed},
                                   {"backward", backward}}) {
    if (flag != 0 && flag != 1) return AB_INVALID("%s: got %d, expected 0 or 1", name, flag);
  }
  s.R = s.slots();
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("experts_path", &device));
  cuda::UsedPaths used;
  AB_RETURN_IF_ERROR(cuda::Products(s, dtype).find(backward != 0, device, &used));
  *path = used.names();
  if (unsupported_reason != nullptr) *unsupported_reason = used.hopper_unsupported_reason;
  return ok();
}
