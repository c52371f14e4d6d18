// The mapping from CUDA errors to statuses. Needs no GPU.
#include "core/cuda/failure.h"

#include <gtest/gtest.h>

namespace anabranch::cuda {
namespace {

TEST(Failure, OnlyErrorsThatAnotherPathMayAvoidAreUnsupported) {
  for (const cudaError_t failure :
       {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction, cudaErrorInvalidConfiguration}) {
    EXPECT_EQ(code_of(failure), AB_UNSUPPORTED) << cudaGetErrorName(failure);
  }
  for (const cudaError_t failure : {cudaErrorMemoryAllocation, cudaErrorLaunchOutOfResources}) {
    EXPECT_EQ(code_of(failure), AB_OUT_OF_MEMORY) << cudaGetErrorName(failure);
  }
  for (const cudaError_t failure : {cudaErrorIllegalAddress, cudaErrorInvalidResourceHandle, cudaErrorLaunchFailure,
                                    cudaErrorMisalignedAddress, cudaErrorInvalidValue, cudaErrorUnknown}) {
    EXPECT_EQ(code_of(failure), AB_INTERNAL) << cudaGetErrorName(failure);
  }
}

TEST(Failure, TheStatusNamesTheOperationAndTheFailure) {
  const ab_status status = failed("router forward", cudaErrorIllegalAddress);
  EXPECT_EQ(status.code, AB_INTERNAL);
  EXPECT_STREQ(status.message, "router forward: an illegal memory access was encountered");
}

TEST(Failure, AGridHasLessThanTwoToTheThirtyOneBlocks) {
  EXPECT_EQ(check_blocks("combine", (int64_t{1} << 31) - 1).code, AB_OK);
  const ab_status status = check_blocks("combine", int64_t{1} << 31);
  EXPECT_EQ(status.code, AB_UNSUPPORTED);
  EXPECT_STREQ(status.message, "combine: got 2147483648 blocks, expected at most 2^31 - 1");
}

}  // namespace
}  // namespace anabranch::cuda
