// core/cuda/keep.cuh on the emulator.
#pragma once

namespace anabranch::cuda {

template <class Value>
void keep(const Value&) {}

}  // namespace anabranch::cuda
