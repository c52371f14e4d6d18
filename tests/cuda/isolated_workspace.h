// A workspace between unmapped addresses.
#pragma once

#include <cuda.h>

#include "device.h"

namespace anabranch::testing {

// Like DeviceWorkspace, but the 2 GiB of addresses before and after it are not mapped, so that any access to them
// fails.
class IsolatedWorkspace {
 public:
  explicit IsolatedWorkspace(size_t bytes) {
    if (bytes == 0) return;
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t granularity = 1;
    EXPECT_CUDA(cudaFree(nullptr));  // makes the context
    expect(driver<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity")(
        &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    bytes_ = (bytes + granularity - 1) / granularity * granularity;
    expect(driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&addresses_, bytes_ + 2 * kUnmapped, 0, 0, 0));
    expect(driver<decltype(cuMemCreate)>("cuMemCreate")(&memory_, bytes_, &properties, 0));
    expect(driver<decltype(cuMemMap)>("cuMemMap")(begin(), bytes_, 0, memory_, 0));
    expect(driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(begin(), bytes_, &access, 1));
    exec_.workspace = reinterpret_cast<void*>(begin());
    exec_.workspace_size = bytes;
    EXPECT_CUDA(cudaMemset(exec_.workspace, 0xff, bytes));
  }
  IsolatedWorkspace(const IsolatedWorkspace&) = delete;
  ~IsolatedWorkspace() {
    if (bytes_ == 0) return;
    expect(driver<decltype(cuMemUnmap)>("cuMemUnmap")(begin(), bytes_));
    expect(driver<decltype(cuMemRelease)>("cuMemRelease")(memory_));
    expect(driver<decltype(cuMemAddressFree)>("cuMemAddressFree")(addresses_, bytes_ + 2 * kUnmapped));
  }

  ab_exec& exec() { return exec_; }
  void check() {}

 private:
  static constexpr size_t kUnmapped = size_t{2} << 30;

  // Tests are not linked with the driver, which machines without a GPU lack.
  template <class Function>
  static Function* driver(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    EXPECT_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
    return reinterpret_cast<Function*>(function);
  }
  static void expect(CUresult result) { EXPECT_EQ(result, CUDA_SUCCESS); }

  CUdeviceptr begin() const { return addresses_ + kUnmapped; }

  size_t bytes_ = 0;
  CUdeviceptr addresses_ = 0;
  CUmemGenericAllocationHandle memory_ = 0;
  ab_exec exec_{sizeof(ab_exec), 0, nullptr, nullptr, 0};
};

}  // namespace anabranch::testing
