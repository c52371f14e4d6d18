#include "experts/cuda/ops/up_element.cuh"
#include "experts/few_rows/product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda::few_rows {
namespace {

struct WriteUp {
  Up up;
  __device__ __forceinline__ void operator()(int32_t expert, int64_t row, int64_t column, int32_t slot, float sum,
                                             float other) const {
    write_up(up, expert, row, column, slot, sum, other);
  }
};

}  // namespace

ab_status multiply(const Up& up, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = up.s;
  Product product;
  product.x = up.x.data;
  product.gathers = up.map.by_slot;
  product.map = up.map;
  product.groups = groups_of(up.group_sizes, s.E, s.R);
  product.w = up.w_in.data;
  product.matrix = s.D * s.P * s.F;
  product.columns = {static_cast<int32_t>(s.F), s.P == 2, s.P == 2 && s.layout.interleaved, static_cast<int32_t>(s.F)};
  product.k = static_cast<int32_t>(s.D);
  product.skips_rest = up.skips_rest;
  return launch_product("up product", up.x.dtype, product, WriteUp{up}, multiprocessors, stream);
}

}  // namespace anabranch::cuda::few_rows
