// cuBLAS, loaded at run time, so that programs need not link to it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/weight_gradient.h"

namespace anabranch {

// GEMMs of row-major matrices. Throws std::runtime_error if cuBLAS returns an error.
class Cublas {
 public:
  Cublas() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      library_ = dlopen(name, RTLD_NOW);
      if (library_ != nullptr) break;
    }
    if (library_ == nullptr) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    multiply_ = reinterpret_cast<Multiply>(dlsym(library_, "cublasGemmEx"));
    multiply_batch_ = reinterpret_cast<MultiplyBatch>(dlsym(library_, "cublasGemmStridedBatchedEx"));
    found_ = create != nullptr && multiply_ != nullptr && multiply_batch_ != nullptr && create(&handle_) == 0;
  }
  bool found() const { return found_; }

  // y [R, N] = x [R, D] w, where w is [D, N], or [N, D] if transposed.
  void run(const cuda::RowsProduct& p) const {
    check(multiply_(handle_, p.transposed ? kTranspose : kAsIs, kAsIs, int_of(p.N), int_of(p.R), int_of(p.D), &one_,
                    p.w, kBf16, int_of(p.transposed ? p.D : p.N), p.x, kBf16, int_of(p.D), &zero_, p.y, kBf16,
                    int_of(p.N), kFloat32, kDefault));
  }

  // d_w [D, N] = x^T d_y for each of E equal groups of R / E rows.
  void run(const cuda::WeightGradient& g) const {
    const int64_t rows = g.R / g.E;
    check(multiply_batch_(handle_, kAsIs, kTranspose, int_of(g.N), int_of(g.D), int_of(rows), &one_, g.d_y.data, kBf16,
                          int_of(g.N), rows * g.N, g.x.data, kBf16, int_of(g.D), rows * g.D, &zero_, g.d_w.data, kBf16,
                          int_of(g.N), g.D * g.N, int_of(g.E), kFloat32, kDefault));
  }

 private:
  using Multiply = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                           const void*, void*, int, int, int, int);
  using MultiplyBatch = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, long long,
                                const void*, int, int, long long, const void*, void*, int, int, long long, int, int,
                                int);
  static constexpr int kAsIs = 0;
  static constexpr int kTranspose = 1;
  static constexpr int kBf16 = 14;     // CUDA_R_16BF
  static constexpr int kFloat32 = 68;  // CUBLAS_COMPUTE_32F
  static constexpr int kDefault = -1;  // CUBLAS_GEMM_DEFAULT

  static int int_of(int64_t value) { return static_cast<int>(value); }
  static void check(int status) {
    if (status != 0) throw std::runtime_error("cuBLAS: status " + std::to_string(status));
  }

  void* library_ = nullptr;
  void* handle_ = nullptr;
  Multiply multiply_ = nullptr;
  MultiplyBatch multiply_batch_ = nullptr;
  bool found_ = false;
  float one_ = 1;
  float zero_ = 0;
};

}  // namespace anabranch
