// Names the phases of the layer in timelines of profilers, as NVTX ranges of the domain "anabranch". A range lasts
// while the host enqueues the phase's kernels; a profiler attributes these to it. Without a profiler a range is a
// comparison of a pointer with NULL.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstddef>

namespace anabranch {

// python/anabranch/phases.py has the same names, and those of the front ends alone.
enum class Phase : unsigned {
  route,
  plan,
  dispatch,
  combine,
  combine_backward,
  exchange,
  quantize,
  up,
  down,
  hidden_gradient,
  weight_gradients,
  d_x,
  route_backward,
  aux_loss,
  grouped_matmul,
};

inline constexpr std::array kPhaseNames = {
    "route",          "plan",     "dispatch",       "combine",         "combine_backward", "exchange",
    "quantize",       "up",       "down",           "hidden_gradient", "weight_gradients", "d_x",
    "route_backward", "aux_loss", "grouped_matmul",
};
static_assert(kPhaseNames.size() == static_cast<size_t>(Phase::grouped_matmul) + 1, "one name per phase");

// The domain and its registered names; NULL without a profiler.
struct NvtxNames {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("anabranch");
  std::array<nvtxStringHandle_t, kPhaseNames.size()> names{};

  NvtxNames() {
    if (domain == nullptr) return;
    for (size_t i = 0; i < names.size(); ++i) names[i] = nvtxDomainRegisterStringA(domain, kPhaseNames[i]);
  }
};

inline const NvtxNames& nvtx_names() {
  static const NvtxNames names;
  return names;
}

// A phase on this thread, from construction to destruction.
class Range {
 public:
  explicit Range(Phase phase) : domain_(nvtx_names().domain) {
    if (domain_ == nullptr) return;
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = nvtx_names().names[static_cast<size_t>(phase)];
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() {
    if (domain_ != nullptr) nvtxDomainRangePop(domain_);
  }

 private:
  nvtxDomainHandle_t domain_;
};

}  // namespace anabranch
