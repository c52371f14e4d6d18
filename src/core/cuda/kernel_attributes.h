// The attributes of kernels, cached per kernel and device: a call of the runtime that sets or reads one takes several
// microseconds, as much as a launch.
//
// Reads take no lock; calls that change an attribute are serialised. Failures are not cached. The cache has a fixed
// size; kernels that find no place in it work without it.
//
// The runtime loses the attributes that were set when a device is reset, and every context has its own. A launch that
// misses its shared memory fails with cudaErrorInvalidValue: launch() then calls forget_kernel_attributes() and tries
// again. A lost hint only costs time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "anabranch/types.h"
#include "core/cuda/device.h"

namespace anabranch::cuda {

// Allows blocks of the kernel to have `block_bytes` of dynamic shared memory. This limit only grows, so threads that
// launch a kernel with different sizes do not disturb each other. If resident_blocks is not 0, also limits the shared
// memory of an SM to what this many blocks need, plus what the system reserves. That is a hint, whose failure is
// ignored.
ab_status prepare_shared_memory(const char* name, const void* kernel, const Device& device, size_t block_bytes,
                                int resident_blocks);

// The PTX version of the kernel's code for the device, 10 major + minor.
cudaError_t find_ptx_version(const void* kernel, const Device& device, int* version);

// Forgets what prepare_shared_memory() set.
void forget_kernel_attributes(const void* kernel, const Device& device);

}  // namespace anabranch::cuda
