// Device tensors between guard zones, and helpers that check that calls write nothing outside their outputs.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <thread>

#include "support.h"

namespace anabranch::testing {

#define EXPECT_CUDA(expression)                                           \
  do {                                                                    \
    const cudaError_t cuda_error = expression;                            \
    EXPECT_EQ(cuda_error, cudaSuccess) << cudaGetErrorString(cuda_error); \
  } while (false)

// Skips with a message if there is no GPU.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      cudaGetLastError();
      GTEST_SKIP() << "NO GPU FOUND: the CUDA tests did not run";
    }
  }
};

class HopperTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    cudaDeviceProp properties;
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    if (properties.major != 9 || properties.minor != 0) {
      GTEST_SKIP() << "NO HOPPER GPU FOUND: the FP8 GEMMs did not run";
    }
  }
};

inline bool device_has_gib(size_t gib) {
  size_t free_bytes = 0;
  size_t total = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total));
  return free_bytes >= gib << 30;
}

#define SKIP_WITHOUT_GIB(gib) \
  if (!device_has_gib(gib)) GTEST_SKIP() << "needs " << (gib) << " GiB of device memory"

inline int64_t element_bytes_of(const ab_tensor& view) {
  switch (view.dtype) {
    case AB_BFLOAT16:
    case AB_FLOAT16:
    case AB_INT16: return 2;
    case AB_FLOAT32:
    case AB_INT32: return 4;
    case AB_INT64: return 8;
    default: return 1;
  }
}

inline int64_t bytes_of(const ab_tensor& view) {
  int64_t bytes = element_bytes_of(view);
  for (int i = 0; i < view.rank; ++i) bytes *= view.shape[i];
  return view.dtype == AB_FLOAT4_E2M1X2 ? bytes / 2 : bytes;
}

// Copies host tensors to the device, each between two guard zones filled with a known pattern.
class Mirrors {
 public:
  ~Mirrors() {
    for (Mirror& mirror : mirrors_) cudaFree(mirror.memory);
  }

  // Copies a tensor to the device, `shift` bytes past an aligned address, and returns a view of the copy; nullptr for
  // nullptr. An empty tensor has a null data pointer, as in torch.
  const ab_tensor* add(const ab_tensor* host, int64_t shift = 0) {
    if (host == nullptr) return nullptr;
    mirrors_.push_back({});
    Mirror& mirror = mirrors_.back();
    mirror.host = host;
    mirror.bytes = bytes_of(*host);
    mirror.shift = static_cast<size_t>(shift);
    EXPECT_CUDA(cudaMalloc(&mirror.memory, mirror.all_bytes()));
    EXPECT_CUDA(cudaMemset(mirror.memory, kPattern, mirror.all_bytes()));
    mirror.view = *host;
    mirror.view.data = mirror.bytes == 0 ? nullptr : static_cast<char*>(mirror.memory) + mirror.begin();
    if (mirror.bytes > 0) {
      EXPECT_CUDA(cudaMemcpy(mirror.view.data, host->data, static_cast<size_t>(mirror.bytes), cudaMemcpyHostToDevice));
    }
    return &mirror.view;
  }

  // Copies everything back to the host tensors and checks the guard zones.
  void fetch() {
    EXPECT_CUDA(cudaDeviceSynchronize());
    for (Mirror& mirror : mirrors_) {
      std::vector<unsigned char> all(mirror.all_bytes());
      EXPECT_CUDA(cudaMemcpy(all.data(), mirror.memory, all.size(), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < mirror.begin(); ++i) ASSERT_EQ(all[i], kPattern) << "written before a tensor";
      for (size_t i = 1; i <= kGuard; ++i) ASSERT_EQ(all[all.size() - i], kPattern) << "written past a tensor";
      if (mirror.bytes > 0) {
        std::memcpy(mirror.host->data, all.data() + mirror.begin(), static_cast<size_t>(mirror.bytes));
      }
    }
  }

 private:
  static constexpr size_t kGuard = 512;
  static constexpr unsigned char kPattern = 0xa5;
  struct Mirror {
    const ab_tensor* host = nullptr;
    void* memory = nullptr;
    int64_t bytes = 0;
    size_t shift = 0;
    ab_tensor view{};

    size_t begin() const { return kGuard + shift; }
    size_t all_bytes() const { return begin() + static_cast<size_t>(bytes) + kGuard; }
  };
  std::deque<Mirror> mirrors_;  // a deque, so that views keep their addresses
};

// A workspace of exactly `bytes`, filled with NaN, between guard zones.
class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(size_t bytes) : host_({static_cast<int64_t>(bytes)}) {
    exec_ = {sizeof(ab_exec), 0, nullptr, nullptr, bytes};
    exec_.workspace = bytes == 0 ? nullptr : mirrors_.add(host_.view())->data;
  }
  ab_exec& exec() { return exec_; }
  void check() { mirrors_.fetch(); }

 private:
  Tensor<uint8_t> host_;
  Mirrors mirrors_;
  ab_exec exec_;
};

// Copies the tensors named by `members` of args to the device, runs the operation with a workspace of the requested
// size, and copies the tensors back. The call runs on a new thread that has not used CUDA yet, as calls of an autograd
// engine do.
template <class Workspace = DeviceWorkspace, class Args, class... Members>
void run_on_copies(ab_status (*workspace_size)(const Args*, const ab_exec*, size_t*),
                   ab_status (*operation)(const Args*, const ab_exec*), Args args, Members... members) {
  Mirrors mirrors;
  ((args.*members = mirrors.add(args.*members)), ...);
  size_t bytes = 0;
  EXPECT_OK(workspace_size(&args, nullptr, &bytes));
  Workspace workspace(bytes);
  std::thread([&] { EXPECT_OK(operation(&args, &workspace.exec())); }).join();
  mirrors.fetch();
  workspace.check();
}

// Waits for the device, then captures the work of enqueue(stream) in a graph and replays it three times.
template <class Enqueue>
void replay_in_graph(const Enqueue& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue(stream);
  EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaGraphLaunch(executable, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace anabranch::testing
