#include "experts/cuda/simple_product.cuh"

namespace anabranch::cuda {
namespace {

// Results become elements of `out`.
struct Store {
  static constexpr int kParts = 1;
  Strided out;
  bool adds = false;  // to what stands there

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
    const Floats to(out.data, out.dtype);
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (i >= results.rows || j >= results.columns) continue;
        const int64_t at =
            tile.expert * out.matrix + (results.row + i) * out.row_step + (results.column + j) * out.column_step;
        to.set(at, adds ? to[at] + results.sums[0][i][j] : results.sums[0][i][j]);
      }
    }
  }
};

}  // namespace

ab_status simple_rows_product(const SimpleProduct& p, const Strided& out, int multiprocessors, cudaStream_t stream) {
  return simple::launch_rows_product(p, Store{out}, multiprocessors, stream);
}

ab_status simple_weight_gradient(const SimpleProduct& p, const Strided& out, bool adds, int multiprocessors,
                                 cudaStream_t stream) {
  return simple::launch_weight_gradient(p, Store{out, adds}, multiprocessors, stream);
}

ab_status check_counts(std::initializer_list<int64_t> sizes, int64_t tiles) {
  // Indices run past a size by less than a tile, and past the number of tiles by less than a grid.
  constexpr int64_t kMost = INT32_MAX - (1 << 20);
  if (tiles > kMost) {
    return error(AB_UNSUPPORTED, "experts: got %lld tiles of results, expected at most %lld on CUDA",
                 static_cast<long long>(tiles), static_cast<long long>(kMost));
  }
  for (const int64_t size : sizes) {
    if (size <= kMost) continue;
    return error(AB_UNSUPPORTED, "experts: got a size of %lld, expected at most %lld on CUDA",
                 static_cast<long long>(size), static_cast<long long>(kMost));
  }
  return ok();
}

}  // namespace anabranch::cuda
