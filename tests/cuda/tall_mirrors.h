// Tall device tensors whose last rows come from the host, for tests of offsets beyond 2^31.
#pragma once

#include "device.h"

namespace anabranch::testing {

// Copies each host tensor into the last rows of a tall device tensor. The other rows are zero.
class TallMirrors {
 public:
  TallMirrors(int64_t rows, int64_t tail) : rows_(rows), tail_(tail) {}
  ~TallMirrors() {
    for (const Mirror& mirror : mirrors_) cudaFree(mirror.view.data);
  }

  const ab_tensor* add(const ab_tensor* host) {
    if (host == nullptr) return nullptr;
    mirrors_.push_back({host, *host});
    ab_tensor& view = mirrors_.back().view;
    if (view.shape[0] == tail_) view.shape[0] = rows_;
    EXPECT_CUDA(cudaMalloc(&view.data, static_cast<size_t>(bytes_of(view))));
    EXPECT_CUDA(cudaMemset(view.data, 0, static_cast<size_t>(bytes_of(view))));
    EXPECT_CUDA(cudaMemcpy(last_rows(mirrors_.back()), host->data, static_cast<size_t>(bytes_of(*host)),
                           cudaMemcpyHostToDevice));
    return &view;
  }

  void fetch() {
    EXPECT_CUDA(cudaDeviceSynchronize());
    for (const Mirror& mirror : mirrors_) {
      EXPECT_CUDA(cudaMemcpy(mirror.host->data, last_rows(mirror), static_cast<size_t>(bytes_of(*mirror.host)),
                             cudaMemcpyDeviceToHost));
    }
  }

 private:
  struct Mirror {
    const ab_tensor* host;
    ab_tensor view;
  };
  static char* last_rows(const Mirror& mirror) {
    return static_cast<char*>(mirror.view.data) + bytes_of(mirror.view) - bytes_of(*mirror.host);
  }
  int64_t rows_;
  int64_t tail_;
  std::deque<Mirror> mirrors_;  // a deque, so that views keep their addresses
};

}  // namespace anabranch::testing
