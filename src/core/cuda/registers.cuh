// Moves registers between the warpgroups of a block (setmaxnreg). All warps of a warpgroup call it, once, at the start
// of their branch of the kernel. __launch_bounds__(threads, 1) limits the registers of the kernel.
#pragma once

namespace anabranch::cuda {

template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0,
                "setmaxnreg requires a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0,
                "setmaxnreg requires a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

}  // namespace anabranch::cuda
