// Few rows at the end of tensors of very many: for offsets past 2^31.
#pragma once

#include "device.h"

namespace anabranch::testing {

// Host tensors as the last rows of tall ones on the device, whose other rows are zeros.
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
  std::deque<Mirror> mirrors_;  // views keep their addresses
};

}  // namespace anabranch::testing
