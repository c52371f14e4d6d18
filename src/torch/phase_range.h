// Names a phase of the layer in the traces of torch.profiler, from construction to destruction. torch's own check
// whether a profiler runs takes less than 0.1 us. Names are "anabranch/" and a name of python/anabranch/phases.py.
#ifndef ANABRANCH_TORCH_PHASE_RANGE_H_
#define ANABRANCH_TORCH_PHASE_RANGE_H_

#include "torch/shims.h"

namespace anabranch::torch {

class PhaseRange {
 public:
  // name: NULL for no range.
  explicit PhaseRange(const char* name) {
    if (name == nullptr || shims.record_start == nullptr) return;
    check(shims.record_start(name, nullptr, nullptr, 0, &range_), "start a range of its profiler");
  }
  PhaseRange(const PhaseRange&) = delete;
  PhaseRange& operator=(const PhaseRange&) = delete;
  ~PhaseRange() {
    if (range_ != nullptr) shims.record_end(range_);
  }

 private:
  void* range_ = nullptr;
};

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_PHASE_RANGE_H_
