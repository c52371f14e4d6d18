// Packed weights on the GPU: the bits of the CPU for packing, and of the unpacked weights for networks.
#include "anabranch/cuda_workspaces.h"
#include "packed_network.h"

namespace anabranch::testing {
namespace {

using PackedCuda = ExpertsCudaTest;
using PackedFewValuesCuda = CudaTest;

constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

void check(const LoraCase& l, const Kinds& kinds) {
  SCOPED_TRACE(::testing::Message() << l << " w_in " << kinds.w_in << " w_out " << kinds.w_out);
  const PackedNetwork want(l, kinds);
  want.network.on_gpu();
  const PackedNetwork got(l, kinds);
  got.on_gpu();
  got.network.expect_same_bits(want.network);
  for (int64_t r = 0; r < l.c.R; ++r) {
    if (want.network.net.slot_of(r) < 0) continue;
    EXPECT_NE(want.network.net.y.get(r * l.c.D), 0.0f) << r;
    EXPECT_TRUE(std::isfinite(want.network.net.dx_rows.get(r * l.c.D))) << r;
  }
}

// 150 rows of 6 experts are too many for the small-M kernels, which read packed weights as they are.
LoraCase case_of(int32_t dtype, int layout, int64_t D, int64_t F, std::vector<int32_t> sizes = {3, 0, 34, 1, 0, 9}) {
  FfnCase c{std::move(sizes), 150, D, F, 2};
  c.T = 21;
  c.K = 3;
  c.dtype = dtype;
  c.layout = layout;
  return {.c = c};
}

// Scratch memory of the emulated library is for one to three of these experts; on a GPU it is for all.
TEST_F(PackedCuda, NetworksHaveTheBitsOfUnpackedWeights) {
  for (const int32_t dtype : kDtypes) {
    check(case_of(dtype, kPfd, 128, 96), {});
    check(case_of(dtype, kFpd, 96, 64), {});
    check(case_of(dtype, kPfd, 128, 128), {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = AB_FLOAT32});
    if (HasFatalFailure()) return;
  }
  check(case_of(AB_BFLOAT16, kPfd, 128, 128), {.w_in = 0});
  check(case_of(AB_BFLOAT16, kPfd, 128, 128), {.w_out = 0});
  check(case_of(AB_BFLOAT16, kPfd, 128, 256), {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = AB_BFLOAT16});
  check(case_of(AB_BFLOAT16, kPfd, 128, 128), {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT4_E2M1X2});
}

TEST_F(PackedCuda, OptionsAndAdapters) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    LoraCase l = case_of(dtype, kFpd, 64, 96);
    l.r = 8;
    l.q = 5;
    l.shared = 5;
    l.c.weighting = Weighting::early;
    check(l, {});
    l = case_of(dtype, kPfd, 128, 128);
    l.c.P = 1;
    l.c.T = l.c.K = 0;
    l.c.activation = AB_RELU2;
    check(l, {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = AB_UINT8});
  }
}

// The small-M kernels add sums in another order than those of plain weights. Compares with the CPU, and checks that a
// second run gives the same bits.
void check_few_rows(const LoraCase& l, const Kinds& kinds) {
  SCOPED_TRACE(::testing::Message() << l << " w_in " << kinds.w_in << " w_out " << kinds.w_out);
  const PackedNetwork want(l, kinds);
  want.network.on_cpu();
  const PackedNetwork got(l, kinds);
  got.on_gpu();
  if (::testing::Test::HasFatalFailure()) return;
  compare(got.network, want.network);
  if (::testing::Test::HasFatalFailure()) return;
  const PackedNetwork again(l, kinds);
  again.on_gpu();
  again.network.expect_same_bits(got.network);
}

// Cold experts, and experts with more rows than a unit.
LoraCase few_rows_case(int32_t dtype, int layout, int64_t D, int64_t F) {
  LoraCase l = case_of(dtype, layout, D, F, {0, 2, 0, 11, 0, 0, 1, 8, 0});
  l.c.R = 25;
  return l;
}

constexpr Kinds kFp8{.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = AB_FLOAT32};

TEST_F(PackedCuda, FewRows) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    check_few_rows(few_rows_case(dtype, kPfd, 32, 288), {});
    check_few_rows(few_rows_case(dtype, kFpd, 736, 96), {});
    check_few_rows(few_rows_case(dtype, kPfd, 640, 128), kFp8);
    if (HasFatalFailure()) return;
  }
  for (const int32_t scales : {AB_BFLOAT16, AB_UINT8}) {
    check_few_rows(few_rows_case(AB_BFLOAT16, kPfd, 128, 256),
                   {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = scales});
  }
  check_few_rows(few_rows_case(AB_BFLOAT16, kPfd, 128, 128), {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT4_E2M1X2});
  check_few_rows(few_rows_case(AB_BFLOAT16, kFpd, 128, 160), {.w_in = 0});
  LoraCase l = case_of(AB_BFLOAT16, kPfd, 128, 128, {0, 0, 0, 0});
  l.c.R = 10;
  check_few_rows(l, {});
  check_few_rows(l, kFp8);
}

// All rows read the same row of x. One expert has two of them.
TEST_F(PackedCuda, FewRowsOfOneToken) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    for (const bool fp8 : {false, true}) {
      LoraCase l = case_of(dtype, kPfd, fp8 ? 640 : 736, 128, {0, 2, 0, 1, 1, 0, 0, 1});
      l.c.R = 6;
      l.c.T = 1;
      l.c.K = 5;
      check_few_rows(l, fp8 ? kFp8 : Kinds{});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PackedCuda, FewRowsWithOptionsAndAdapters) {
  for (const bool fp8 : {false, true}) {
    LoraCase l = few_rows_case(AB_BFLOAT16, fp8 ? kPfd : kFpd, 128, 256);
    l.r = 8;
    l.q = 40;
    l.shared = 5;
    l.c.weighting = Weighting::early;
    l.c.activation = AB_SWIGLU_OAI;
    check_few_rows(l, fp8 ? kFp8 : Kinds{});
    l = few_rows_case(AB_FLOAT16, kPfd, 128, 128);
    l.c.P = 1;
    l.c.T = l.c.K = 0;
    l.c.activation = AB_RELU2;
    l.c.biases = false;
    check_few_rows(l, fp8 ? kFp8 : Kinds{});
  }
}

// Compares the forward pass with the CPU.
void check_forward(const LoraCase& l, const Kinds& kinds) {
  SCOPED_TRACE(::testing::Message() << l << " w_in " << kinds.w_in << " w_out " << kinds.w_out);
  const PackedNetwork want(l, kinds), got(l, kinds);
  want.network.on_cpu();
  got.forward_on_gpu();
  if (::testing::Test::HasFatalFailure()) return;
  compare_rows("h", want.network.net, got.network.net.h, want.network.net.h);
  compare_rows("y", want.network.net, got.network.net.y, want.network.net.y);
}

// Rows of x that fit in shared memory, and rows that do not; more blocks along k than a warp holds scales of; so many
// ranges that their list and the rows fill shared memory.
TEST_F(PackedCuda, FewRowsWithLongSums) {
  struct Sizes {
    std::vector<int32_t> experts;
    int64_t R;
    int64_t D;
  };
  const std::vector<int32_t> many(48, 12);
  for (const Sizes& sizes :
       {Sizes{{0, 2, 1}, 4, 4352}, Sizes{{0, 2, 1}, 4, 14464}, Sizes{{12, 0, 33}, 46, 3712}, Sizes{many, 600, 4096}}) {
    for (const bool fp8 : {false, true}) {
      if (fp8 && sizes.R == 600) continue;  // F = 128: 16 times the work on the emulator
      LoraCase l = case_of(AB_BFLOAT16, kPfd, sizes.D, fp8 ? 128 : 8, sizes.experts);
      l.c.R = sizes.R;
      l.c.T = sizes.R;
      check_forward(l, fp8 ? Kinds{.w_in = AB_FLOAT8_E4M3, .w_out = 0} : Kinds{.w_out = 0});
      if (HasFatalFailure()) return;
    }
  }
}

// With 132 multiprocessors teams of the up GEMM have two warps, and CTAs have two or three rounds with the same rows.
TEST_F(PackedCuda, FewRowsOfALargeExpert) {
  for (const int32_t rows : {1, 4}) {
    LoraCase l = case_of(AB_BFLOAT16, kPfd, 1024, 17408, {rows});
    l.c.R = l.c.T = rows;
    l.c.K = 1;
    check_forward(l, {.w_out = 0});
    if (HasFatalFailure()) return;
  }
}

// Units of 16 and of 32 rows: 6 and 15 rows per expert on average, up to several units per expert.
TEST_F(PackedCuda, UnitsOfMoreRows) {
  const std::vector<int32_t> sizes[] = {{0, 17, 3, 16, 0, 1, 5}, {40, 0, 33, 3, 20, 8, 1}};
  for (const std::vector<int32_t>& of_experts : sizes) {
    for (const bool fp8 : {false, true}) {
      LoraCase l = few_rows_case(AB_BFLOAT16, fp8 ? kPfd : kFpd, fp8 ? 640 : 736, 128);
      l.c.sizes = of_experts;
      l.c.R = std::accumulate(of_experts.begin(), of_experts.end(), int64_t{2});
      l.c.T = l.c.R / 2;
      l.r = 8;
      check_few_rows(l, fp8 ? kFp8 : Kinds{});
    }
    LoraCase l = few_rows_case(AB_FLOAT16, kPfd, 96, 160);
    l.c.sizes = of_experts;
    l.c.R = std::accumulate(of_experts.begin(), of_experts.end(), int64_t{0});
    l.c.P = 1;
    l.c.T = l.c.K = 0;
    check_few_rows(l, {});
  }
}

// Operands at any address and adapters of any rank need no other kernel. Plain weights would take one.
TEST_F(PackedCuda, FewRowsAtAnyAddressAndRank) {
  using A = ab_expert_ffn_forward_args;
  for (const bool fp8 : {false, true}) {
    for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
      LoraCase l = few_rows_case(dtype, kPfd, 256, 128);
      l.r = 5;
      l.q = 43;
      const PackedNetwork want(l, fp8 ? kFp8 : Kinds{});
      want.network.on_cpu();
      const PackedNetwork got(l, fp8 ? kFp8 : Kinds{});
      A args = got.with_packed(got.network.forward_args());
      Mirrors mirrors;
      for (const auto member : {&A::w_in, &A::w_out}) args.*member = mirrors.add(args.*member, 3);
      for (const auto member : {&A::w_in_block_scales, &A::w_out_block_scales}) {
        args.*member = mirrors.add(args.*member, fp8 ? 4 : 1);
      }
      for (const auto member : {&A::x, &A::b_in, &A::b_out, &A::y, &A::h, &A::lora_u, &A::lora_z, &A::lora_a_in,
                                &A::lora_b_in, &A::lora_a_out, &A::lora_b_out}) {
        args.*member = mirrors.add(args.*member, 2);
      }
      for (const auto member : {&A::slot_of_row, &A::group_sizes, &A::weights}) {
        args.*member = mirrors.add(args.*member);
      }
      size_t bytes = 0;
      EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&args, nullptr, &bytes));
      DeviceWorkspace workspace(bytes);
      EXPECT_OK(ab_cuda_expert_ffn_forward(&args, &workspace.exec()));
      mirrors.fetch();
      workspace.check();
      compare_rows("y", want.network.net, got.network.net.y, want.network.net.y);
      compare_rows("h", want.network.net, got.network.net.h, want.network.net.h);
    }
  }
}

// The combined GEMM of packed weights has the bits of that of their values. transposed: it sums over C. Row r belongs
// to assignment r of T tokens.
void check_combined_gemm(const PackedTensor& packed, bool transposed, const FloatTensor& x, int64_t T,
                         const std::vector<int32_t>& rows_of_experts) {
  using A = ab_grouped_matmul_combine_args;
  const bool fp4 = packed.is_fp4();
  const int64_t E = packed.M;
  const int64_t R = x.view()->shape[0];
  const int64_t columns = transposed ? packed.N : packed.C;
  FloatTensor plain({E, packed.N, packed.C}, x.dtype()), got({T, columns}, x.dtype()), want({T, columns}, x.dtype());
  PackedNetwork::fill(packed, &plain);
  std::vector<int32_t> slots(static_cast<size_t>(R));
  std::iota(slots.begin(), slots.end(), 0);
  const Tensor<int32_t> slot_of_row({R}, slots), row_of_slot({T, R / T}, slots), sizes({E}, rows_of_experts);
  int64_t strides[2][AB_MAX_RANK] = {};
  const ab_tensor w = packed.view({E, packed.N, packed.C}, {0, 1, 2}, strides[0]);
  const ab_tensor scales = packed.scales_view({E, fp4 ? packed.N : packed.N / kBlock, packed.C / (fp4 ? 32 : kBlock)},
                                              {0, 1, 2}, strides[1]);
  A args{};
  args.size = sizeof(args);
  args.transpose_w = transposed ? 1 : 0;
  args.x = x.view();
  args.group_sizes = sizes.view();
  args.slot_of_row = slot_of_row.view();
  args.row_of_slot = row_of_slot.view();
  const auto run = [&](const ab_tensor* weights, const ab_tensor* block_scales, const ab_tensor* out) {
    args.w = weights;
    args.w_block_scales = block_scales;
    args.out = out;
    run_on_copies(ab_cuda_grouped_matmul_combine_workspace, ab_cuda_grouped_matmul_combine, args, &A::x, &A::w,
                  &A::group_sizes, &A::slot_of_row, &A::row_of_slot, &A::out, &A::w_block_scales);
  };
  run(plain.view(), nullptr, want.view());
  run(&w, &scales, got.view());
  EXPECT_TRUE(got.is(want)) << x.dtype() << " " << packed.dtype << " " << transposed;
}

// Rows of x are unit vectors, so results are the unpacked values, and NaN where the terms of a sum have NaN or
// infinity. transposed: the GEMM sums along the rows of the weights in memory.
void unpack_every_code_and_scale(const std::vector<int32_t>& dtypes, const std::vector<int32_t>& rows_of_experts,
                                 bool transposed = true) {
  const auto E = static_cast<int64_t>(rows_of_experts.size());
  const int64_t rows = std::accumulate(rows_of_experts.begin(), rows_of_experts.end(), int64_t{0});
  for (const int32_t dtype : dtypes) {
    for (const int32_t kind : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
      const bool fp4 = kind == AB_FLOAT4_E2M1X2;
      const int64_t N = fp4 ? 256 : 128, C = fp4 ? 32 : 128;
      PackedTensor packed(E, N, C, kind, fp4 ? AB_FLOAT8_E8M0 : AB_UINT8, 3);
      for (int64_t i = 0; i < packed.values.size(); ++i) packed.values[i] = static_cast<uint8_t>(i * 7 + i / 256);
      for (int64_t i = 0; i < packed.byte_scales.size(); ++i) {
        packed.byte_scales[i] = static_cast<uint8_t>(fp4 ? i * 5 : 120 + i);
      }
      const int64_t length = transposed ? C : N;  // of sums
      FloatTensor x({rows, length}, dtype);
      for (int64_t r = 0; r < rows; ++r) x.set(r * length + r * 37 % length, 1.0f);
      check_combined_gemm(packed, transposed, x, rows, rows_of_experts);
    }
  }
}

TEST_F(PackedFewValuesCuda, FewRowsUnpackEveryCodeAndScale) {
  unpack_every_code_and_scale({AB_BFLOAT16, AB_FLOAT16}, {9, 0, 3, 1, 2, 7, 8, 1, 1});
}

TEST_F(PackedFewValuesCuda, ManyRowsUnpackEveryCodeAndScale) {
  for (const bool transposed : {false, true}) {
    unpack_every_code_and_scale({AB_BFLOAT16, AB_FLOAT16}, {70, 0, 130, 32, 33, 31, 8, 1, 64}, transposed);
  }
}

// Kernels that decode on the way to tensor cores: several tiles in both directions, more k-blocks than stages, parts of
// tiles and of k-blocks, uneven and cold experts.
TEST_F(PackedCuda, LargerThanTiles) {
  const std::vector<int32_t> sizes = {300, 0, 129, 1, 64, 205};
  const std::vector<int32_t> few = {0, 5, 129, 1, 0, 64, 0, 16};  // so few that Hopper's tiles have 64 rows
  for (const bool fp8 : {false, true}) {
    const Kinds kinds = fp8 ? kFp8 : Kinds{};
    for (const int layout : {kPfd, kFpd}) {
      if (fp8 && layout == kFpd) continue;
      for (const auto weighting : {Weighting::none, Weighting::early, Weighting::late}) {
        LoraCase l =
            fp8 ? case_of(AB_BFLOAT16, layout, 640, 384, sizes) : case_of(AB_BFLOAT16, layout, 544, 416, sizes);
        l.c.R = 720;
        l.c.T = 250;
        l.c.weighting = weighting;
        l.c.biases = weighting != Weighting::early;
        l.c.activation = weighting == Weighting::none ? AB_SWIGLU_OAI : AB_SILU;
        if (weighting == Weighting::early) {
          l.r = 8;
          l.q = 40;
          l.shared = 5;
        }
        check(l, kinds);
        if (HasFatalFailure()) return;
        if (weighting == Weighting::late) continue;
        l.c.sizes = few;
        l.c.R = 220;
        l.c.T = 80;
        check(l, kinds);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Tiles whose weights two CTAs of a cluster share, with parts of tiles below and beside them; k-blocks in part, or only
// one.
TEST_F(PackedCuda, LargeGroups) {
  for (const bool fp8 : {false, true}) {
    for (const int layout : {kPfd, kFpd}) {
      if (fp8 && layout == kFpd) continue;
      const std::vector<int32_t> sizes = {530, 0, 300, 5, 1030};
      LoraCase l = fp8              ? case_of(AB_BFLOAT16, layout, 384, 128, sizes)
                   : layout == kPfd ? case_of(AB_BFLOAT16, layout, 352, 96, sizes)
                                    : case_of(AB_BFLOAT16, layout, 64, 64, sizes);
      l.c.R = 1870;
      l.c.T = 650;
      l.c.weighting = Weighting::late;
      check(l, fp8 ? kFp8 : Kinds{});
      if (HasFatalFailure()) return;
    }
  }
}

// The large tiles of the sm80 kernels for ungated experts and in float16.
TEST_F(PackedCuda, LargerThanTilesInFloat16) {
  for (const bool fp8 : {false, true}) {
    for (const int64_t P : {1, 2}) {
      LoraCase l = fp8 ? case_of(AB_FLOAT16, kPfd, 384, 256, {300, 0, 129, 1, 64, 205})
                       : case_of(AB_FLOAT16, kFpd, 416, 224, {300, 0, 129, 1, 64, 205});
      l.c.R = 720;
      l.c.T = 250;
      l.c.P = P;
      l.c.activation = P == 1 ? AB_RELU2 : AB_SILU;
      l.r = 12;
      l.q = 16;
      check(l, fp8 ? kFp8 : Kinds{});
      if (HasFatalFailure()) return;
    }
  }
}

// The intermediate gradient of plain weights has tiles of 256 columns here, and of 128 in the test above. With T = 0
// rows are not gathered.
TEST_F(PackedCuda, LargerTilesOfPlainWeights) {
  for (const bool fp8 : {false, true}) {
    LoraCase l = case_of(AB_BFLOAT16, kPfd, 1152, 1280, {5000, 0, 3700});
    l.c.R = 8800;
    l.c.T = fp8 ? 3000 : 0;
    l.c.K = fp8 ? 3 : 0;
    check(l, fp8 ? kFp8 : Kinds{});
  }
}

// Both orientations of a combined GEMM, in one and in several ranges of experts.
TEST_F(PackedCuda, CombinedGemms) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t kind : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
      for (const bool transposed : {false, true}) {
        const PackedTensor packed(5, 128, 256, kind, AB_FLOAT8_E8M0, 3);
        FloatTensor x({148, transposed ? packed.C : packed.N}, dtype);
        x.fill_normal(4);
        check_combined_gemm(packed, transposed, x, 74, {11, 0, 17, 1, 116});
      }
    }
  }
}

// Sums per token in several chunks of columns.
TEST_F(PackedCuda, LargerChunksOfColumns) {
  for (const int32_t kind : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
    const PackedTensor packed(8, 4096, 256, kind, AB_FLOAT8_E8M0, 3);
    FloatTensor x({4000, packed.C}, AB_BFLOAT16);
    x.fill_normal(4);
    check_combined_gemm(packed, true, x, 2000, {900, 0, 700, 1, 299, 600, 500, 1000});
  }
}

// Unpacks on the device, `shift` bytes past aligned addresses.
void unpack_on_gpu(const ab_unpack_args& args, int64_t shift) {
  Mirrors mirrors;
  const ab_unpack_args copies{sizeof(ab_unpack_args), mirrors.add(args.packed, shift),
                              mirrors.add(args.scales, args.scales->dtype == AB_FLOAT32 ? 0 : 2 * shift),
                              mirrors.add(args.w, 4 * shift)};
  size_t bytes = 1;
  EXPECT_OK(ab_cuda_unpack_workspace(&copies, nullptr, &bytes));
  EXPECT_EQ(bytes, 0u);
  EXPECT_OK(ab_cuda_unpack(&copies, nullptr));
  mirrors.fetch();
}

TEST_F(PackedFewValuesCuda, UnpacksToTheBitsOfTheCpu) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t kind : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
      for (const int32_t scales_dtype : {AB_FLOAT8_E8M0, AB_UINT8, AB_FLOAT32, AB_BFLOAT16}) {
        if (kind == AB_FLOAT4_E2M1X2 && scales_dtype != AB_FLOAT8_E8M0) continue;
        PackedTensor packed(2, 256, 128, kind, scales_dtype, 5);
        for (int64_t i = 0; i < packed.values.size(); ++i) packed.values[i] = static_cast<uint8_t>(i * 7 + i / 256);
        for (int64_t i = 0; i < packed.byte_scales.size(); ++i) packed.byte_scales[i] = static_cast<uint8_t>(i);
        FloatTensor want({2, 256, 128}, dtype), got({2, 256, 128}, dtype);
        int64_t strides[2][AB_MAX_RANK] = {};
        const bool fp4 = packed.is_fp4();
        const ab_tensor values = packed.view({2, 256, 128}, {0, 1, 2}, strides[0]);
        const ab_tensor scales = packed.scales_view({2, fp4 ? 256 : 2, fp4 ? 4 : 1}, {0, 1, 2}, strides[1]);
        ab_unpack_args args{sizeof(args), &values, &scales, want.view()};
        EXPECT_OK(call(ab_unpack, ab_unpack_workspace, args));
        args.w = got.view();
        for (const int64_t shift : {0, 1, 4}) {
          unpack_on_gpu(args, shift);
          EXPECT_TRUE(got.is(want)) << dtype << " " << kind << " " << scales_dtype << " " << shift;
        }
      }
    }
  }
}

TEST_F(PackedFewValuesCuda, PacksToTheBitsOfTheCpu) {
  using A = ab_pack_mxfp4_args;
  for (const int32_t dtype : kDtypes) {
    for (const int32_t rule : {AB_MXFP4_SCALES_FLOOR, AB_MXFP4_SCALES_CEIL}) {
      FloatTensor w({70, 96}, dtype);
      w.fill_normal(6);
      for (int64_t i = 0; i < w.size(); ++i) w.set(i, w.get(i) * std::ldexp(1.0f, static_cast<int>(i / 96 % 20) - 10));
      w.set(5, std::numeric_limits<float>::quiet_NaN());
      w.set(100, -std::numeric_limits<float>::infinity());
      for (int64_t i = 192; i < 224; ++i) w.set(i, -0.0f);
      const auto codes_of = [](Bytes& codes) {
        ab_tensor view = *codes.view();
        view.dtype = AB_FLOAT4_E2M1X2;
        view.shape[1] = 96;
        return view;
      };
      Bytes codes({70, 48}), want_codes({70, 48}), scales({70, 3}), want_scales({70, 3});
      const ab_tensor view = codes_of(codes);
      const ab_tensor want_view = codes_of(want_codes);
      EXPECT_OK(
          call(ab_pack_mxfp4, ab_pack_mxfp4_workspace, A{sizeof(A), rule, w.view(), &want_view, want_scales.view()}));
      run_on_copies(ab_cuda_pack_mxfp4_workspace, ab_cuda_pack_mxfp4,
                    A{sizeof(A), rule, w.view(), &view, scales.view()}, &A::w, &A::codes, &A::scales);
      EXPECT_EQ(codes.values(), want_codes.values()) << dtype << " " << rule;
      EXPECT_EQ(scales.values(), want_scales.values()) << dtype << " " << rule;
    }
  }
}

// The workspace is at most what the bounds for a front end say. Few rows need no memory for unpacked weights.
TEST(PackedWorkspace, IsWithinItsBound) {
  for (const int64_t R : {144, 145}) {
    LoraCase l = case_of(AB_BFLOAT16, kPfd, 128, 128);
    l.c.R = R;
    const PackedNetwork n(l, {});
    size_t plain = 0, packed = 0, in = 0, out = 0;
    const ab_expert_ffn_forward_args args = n.network.forward_args();
    const ab_expert_ffn_forward_args with = n.with_packed(args);
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&args, nullptr, &plain));
    EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&with, nullptr, &packed));
    EXPECT_OK(ab_cuda_unpacked_workspace_bound(R, 6, 256, 128, 0, AB_BFLOAT16, &in));
    EXPECT_OK(ab_cuda_unpacked_workspace_bound(R, 6, 128, 128, 0, AB_BFLOAT16, &out));
    EXPECT_EQ(packed > plain, R > 144);
    EXPECT_EQ(std::max(in, out) > 0, R > 144);
    EXPECT_LE(packed, plain + std::max(in, out));
  }
}

}  // namespace
}  // namespace anabranch::testing
