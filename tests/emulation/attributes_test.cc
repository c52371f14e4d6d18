// The caches of attributes of devices and kernels: which calls ask the runtime, and what they do after failures.
#include <thread>
#include <vector>

#include "anabranch/cuda.h"
#include "core/cuda/device.h"
#include "core/cuda/kernel_attributes.h"
#include "cuda_runtime.h"
#include "float_tensor.h"
#include "grouped_matmul_args.h"
#include "support.h"

namespace anabranch::testing {
namespace {

using emulation::runtime;

// Each test uses devices and kernels of its own, because the caches live as long as the process.
class Attributes : public ::testing::Test {
 protected:
  void TearDown() override {
    runtime.attribute_calls_fail = false;
    runtime.device = 0;
  }
};

constexpr int kProperties = 5;
constexpr size_t kBytes = 60 << 10;  // more than a kernel has by default
char kernels[4096];                  // its elements' addresses stand for kernels

cuda::Device use_device(int number) {
  runtime.device = number;
  cuda::Device device;
  EXPECT_EQ(cuda::current_device(&device), cudaSuccess);
  EXPECT_EQ(device.number, number);
  return device;
}

template <class Call>
int attribute_calls_of(const Call& call) {
  const int before = runtime.attribute_calls;
  call();
  return runtime.attribute_calls - before;
}

TEST_F(Attributes, PropertiesOfADeviceAreReadOnce) {
  for (const int device : {1, 2}) {
    EXPECT_EQ(attribute_calls_of([&] { use_device(device); }), kProperties);
  }
  for (const int device : {1, 2}) {
    EXPECT_EQ(attribute_calls_of([&] {
                const cuda::Device found = use_device(device);
                EXPECT_EQ(found.multiprocessors, 3);
                EXPECT_EQ(found.capability, 80);
                EXPECT_EQ(found.shared_bytes, 164 << 10);
                EXPECT_EQ(found.max_block_shared_bytes, 99 << 10);
              }),
              0);
  }
}

TEST_F(Attributes, FailuresAreNotCached) {
  runtime.device = 3;
  runtime.attribute_calls_fail = true;
  cuda::Device device;
  EXPECT_REFUSED(cuda::find_device("plan", &device), AB_OUT_OF_MEMORY, "plan: no usable GPU: ");
  EXPECT_EQ(cuda::prepare_shared_memory("combine", kernels, device, kBytes, 0).code, AB_OUT_OF_MEMORY);
  int version = 0;
  EXPECT_EQ(cuda::find_ptx_version(kernels, device, &version), cudaErrorMemoryAllocation);
  EXPECT_OK(cuda::prepare_shared_memory("combine", kernels, device, 0, 2));  // a hint

  runtime.attribute_calls_fail = false;
  EXPECT_OK(cuda::find_device("plan", &device));
  EXPECT_EQ(attribute_calls_of([&] { EXPECT_OK(cuda::prepare_shared_memory("", kernels, device, kBytes, 2)); }), 2);
  EXPECT_EQ(cuda::find_ptx_version(kernels, device, &version), cudaSuccess);
  EXPECT_EQ(version, 80);
}

TEST_F(Attributes, DevicesBeyondTheCacheWork) {
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(attribute_calls_of([&] {
                const cuda::Device device = use_device(64);
                EXPECT_OK(cuda::prepare_shared_memory("", kernels, device, kBytes, 0));
              }),
              kProperties + 1);
  }
}

TEST_F(Attributes, AKernelIsPreparedOncePerDevice) {
  const char* const kernel = kernels + 1;
  for (const int number : {4, 5}) {
    const cuda::Device device = use_device(number);
    const auto calls = [&](size_t bytes, int resident_blocks) {
      return attribute_calls_of(
          [&] { EXPECT_OK(cuda::prepare_shared_memory("", kernel, device, bytes, resident_blocks)); });
    };
    EXPECT_EQ(calls(48 << 10, 0), 0);
    EXPECT_EQ(calls(kBytes, 0), 1);
    EXPECT_EQ(calls(kBytes, 0), 0);
    EXPECT_EQ(calls(kBytes + 1, 0), 1);
    EXPECT_EQ(calls(kBytes, 0), 0);
    EXPECT_EQ(emulation::limit_of(kernel), static_cast<int>(kBytes) + 1) << "a smaller block must not lower the limit";
    EXPECT_EQ(calls(0, 1), 1);
    EXPECT_EQ(calls(0, 1), 0);
    EXPECT_EQ(calls(kBytes, 2), 1) << "the hint is another";
    EXPECT_REFUSED(cuda::prepare_shared_memory("combine", kernel, device, 100 << 10, 0), AB_UNSUPPORTED,
                   "combine: a block needs 102400 bytes of shared memory, more than the device has");
    EXPECT_EQ(calls(kBytes, 0), 0);
    int version = 0;
    const auto read = [&] { EXPECT_EQ(cuda::find_ptx_version(kernel, device, &version), cudaSuccess); };
    EXPECT_EQ(attribute_calls_of(read), 1);
    EXPECT_EQ(attribute_calls_of(read), 0);
    cuda::forget_kernel_attributes(kernel, device);
    EXPECT_EQ(calls(kBytes, 2), 2);
    EXPECT_EQ(attribute_calls_of(read), 0) << "a reset does not change the code";
  }
}

// The limit must fit the largest block when all threads are done, in whatever order they set it.
TEST_F(Attributes, ThreadsAgreeOnTheLargestLimit) {
  const cuda::Device device = use_device(6);
  for (int i = 0; i < 200; ++i) {
    const char* const kernel = kernels + 100 + i;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, bytes = kBytes + static_cast<size_t>(thread * 7 % 4)] {
        EXPECT_OK(cuda::prepare_shared_memory("", kernel, device, bytes, 0));
        EXPECT_GE(emulation::limit_of(kernel), static_cast<int>(bytes));
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(emulation::limit_of(kernel), static_cast<int>(kBytes) + 3);
  }
}

TEST_F(Attributes, ASecondCallOfAnOperationReadsAndSetsNone) {
  const FloatTensor x({300, 64}, AB_BFLOAT16), w({1, 64, 320}, AB_BFLOAT16), y({300, 320}, AB_BFLOAT16);
  const Tensor<int32_t> sizes({1}, std::vector<int32_t>{300});
  const ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view());
  const auto multiply = [&] { EXPECT_OK(call(ab_cuda_grouped_matmul, ab_cuda_grouped_matmul_workspace, args)); };
  EXPECT_GT(attribute_calls_of(multiply), 0);
  EXPECT_EQ(attribute_calls_of(multiply), 0);
}

// The last test: it fills the table, which holds 1024 kernels.
TEST_F(Attributes, MoreKernelsThanTheCacheHoldsWork) {
  const cuda::Device device = use_device(7);
  for (const char& kernel : kernels) {
    EXPECT_OK(cuda::prepare_shared_memory("", &kernel, device, kBytes, 0));
    EXPECT_EQ(emulation::limit_of(&kernel), static_cast<int>(kBytes));
  }
}

}  // namespace
}  // namespace anabranch::testing
