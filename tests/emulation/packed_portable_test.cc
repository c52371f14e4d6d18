// The sm80 kernels of packed weights: which GEMMs they take, and windows of columns.
#include "experts/portable/packed_products.h"

#include "experts/cuda/packed_path.h"
#include "experts/portable/products.h"
#include "experts_case.h"
#include "packed_operands.h"

namespace anabranch::testing {
namespace {

using cuda::PackedPath;
using cuda::PackedRowsProduct;

alignas(16) uint8_t memory[64];

template <class Operation>
PackedPath path_of(const Operation& op, const cuda::Device& device = {108, 80}) {
  auto path = PackedPath::unpacked;
  EXPECT_OK(cuda::choose_path(op, device, &path));
  return path;
}

// 16 experts with matrices [512, 256]. transposed: down, else d_x.
PackedRowsProduct rows_product(int64_t rows_per_expert, bool transposed) {
  PackedRowsProduct p;
  p.x = memory;
  p.transposed = transposed;
  p.dtype = AB_BFLOAT16;
  p.R = rows_per_expert * 16;
  p.E = 16;
  p.D = transposed ? 256 : 512;
  p.N = transposed ? 512 : 256;
  p.packed = {memory, memory, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 512, 256};
  return p;
}

TEST(PackedPortablePaths, DependOnRowsDtypeAndAlignment) {
  for (const bool transposed : {false, true}) {
    EXPECT_EQ(path_of(rows_product(0, transposed)), PackedPath::unpacked);
    EXPECT_EQ(path_of(rows_product(24, transposed)), transposed ? PackedPath::few_rows : PackedPath::portable);
    EXPECT_EQ(path_of(rows_product(25, transposed)), PackedPath::portable);
    EXPECT_EQ(path_of(rows_product(1024, transposed)), PackedPath::portable);
    EXPECT_EQ(path_of(rows_product(1025, transposed)), PackedPath::unpacked);
    PackedRowsProduct p = rows_product(100, transposed);
    p.weights = Floats(memory, AB_FLOAT32);
    p.dtype = AB_FLOAT16;
    EXPECT_EQ(path_of(p), PackedPath::portable);
    p.x = memory + 2;
    EXPECT_EQ(path_of(p), PackedPath::unpacked);
    p = rows_product(100, transposed);
    p.packed.values = memory + 8;
    EXPECT_EQ(path_of(p), PackedPath::unpacked);
    p = rows_product(100, transposed);
    p.first_column = 16;
    p.N = 96;
    EXPECT_EQ(path_of(p), transposed ? PackedPath::portable : PackedPath::unpacked);
    p.packed.dtype = AB_FLOAT8_E4M3;
    EXPECT_EQ(path_of(p), PackedPath::portable);
    p = rows_product(100, transposed);
    p.dtype = AB_FLOAT32;
    EXPECT_EQ(path_of(p), PackedPath::unpacked);
  }
  PackedRowsProduct p = rows_product(100, false);  // rows of x are not aligned
  p.packed.N = p.D = 508;
  EXPECT_EQ(path_of(p), PackedPath::unpacked);
}

TEST(PackedPortablePaths, IncludeUngatedExpertsAndDh) {
  cuda::PackedUp up;
  up.s.R = 1600;
  up.s.E = 16;
  up.s.D = 256;
  up.s.P = 1;
  up.s.F = 512;
  up.x = Floats(memory, AB_BFLOAT16);
  up.packed = {memory, memory, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 512, 256};
  EXPECT_EQ(path_of(up), PackedPath::portable);
  cuda::PackedIntermediateGradient dh;
  dh.s = up.s;
  dh.d_y = dh.h = up.x;
  dh.packed = {memory, memory, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 256, 512};
  EXPECT_EQ(path_of(dh), PackedPath::portable);
}

// A window of columns has the bits of the window of the unpacked weights.
void check_window(int32_t kind, bool transposed, int64_t first, int64_t count) {
  SCOPED_TRACE(::testing::Message() << kind << " " << transposed << " " << first);
  const int64_t E = 3, R = 40, N = 256, C = 384;
  const PackedTensor packed(E, N, C, kind, AB_FLOAT8_E8M0, 3);
  FloatTensor plain({E, N, C}, AB_BFLOAT16), x({R, transposed ? C : N}, AB_BFLOAT16), got({R, count}, AB_BFLOAT16),
      want({R, count}, AB_BFLOAT16);
  for (int64_t i = 0; i < packed.size(); ++i) plain.set(i, packed.value(i));
  x.fill_normal(4);
  const Tensor<int32_t> sizes({E}, {17, 0, 23});
  PackedRowsProduct p;
  p.x = x.view()->data;
  p.transposed = transposed;
  p.group_sizes = static_cast<const int32_t*>(sizes.view()->data);
  p.map = cuda::RowMap(nullptr, 0, 0, R);
  p.dtype = AB_BFLOAT16;
  p.R = R;
  p.E = E;
  p.D = transposed ? C : N;
  p.N = count;
  p.w_columns = transposed ? N : C;
  p.packed = {packed.values.values().data(), packed.scales_data(), kind, packed.scales_dtype, N, C};
  p.first_column = first;
  p.y = got.view()->data;
  ASSERT_EQ(cuda::portable::unsupported_reason(p), nullptr);
  EXPECT_OK(cuda::portable::launch_gemm(p, 3, nullptr));
  cuda::RowsProduct unpacked = p;
  unpacked.y = want.view()->data;
  unpacked.w = static_cast<const char*>(plain.view()->data) + 2 * first * (transposed ? C : 1);
  EXPECT_OK(cuda::portable::launch_gemm(unpacked, 3, nullptr));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_NE(want.get(0), 0.0f);
  EXPECT_TRUE(got.is(want));
}

TEST(PackedPortableWindows, HaveTheBitsOfUnpackedWeights) {
  check_window(AB_FLOAT4_E2M1X2, true, 41, 150);
  check_window(AB_FLOAT4_E2M1X2, false, 96, 200);
  check_window(AB_FLOAT8_E4M3, true, 100, 150);
  check_window(AB_FLOAT8_E4M3, false, 80, 200);
}

}  // namespace
}  // namespace anabranch::testing
