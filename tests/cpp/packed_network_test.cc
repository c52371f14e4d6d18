// A network with packed weights has the bits of the network with the unpacked ones.
#include <map>
#include <set>
#include <string>

#include "grouped_matmul_args.h"
#include "lora_network.h"
#include "packed_operands.h"

namespace anabranch::testing {
namespace {

struct PackedCase {
  int32_t w_in = AB_FLOAT4_E2M1X2;  // dtype; 0: not packed
  int32_t w_out = AB_FLOAT4_E2M1X2;
  int32_t scales = AB_FLOAT8_E8M0;
  bool interleaved = false;
  bool has_adapters = true;
};

LoraCase case_of(int32_t dtype, bool interleaved) {
  LoraCase c = in_dtype(dtype, dtype);
  c.w_in = interleaved ? Order{0, 3, 2, 1} : Order{0, 2, 3, 1};
  c.w_out = {0, 2, 1};
  if (interleaved) c.intermediate = {0, 2, 1};
  c.D = 96;
  c.F = 64;
  return c;
}

// Packed weights of a network.
class PackedNetwork {
 public:
  PackedNetwork(const LoraCase& c, const PackedCase& packed_case) : network(c), packed(packed_case) {
    const int64_t E = network.E;
    const Order order = packed.interleaved ? Order{0, 3, 2, 1} : Order{0, 2, 3, 1};
    if (packed.w_in != 0) {
      w_in = std::make_unique<PackedTensor>(E, c.P * c.F, c.D, packed.w_in, packed.scales, 1);
      const bool fp4 = w_in->is_fp4();
      views[0] = w_in->view({E, c.D, c.P, c.F}, order, strides[0]);
      views[1] = w_in->scales_view({E, c.D / (fp4 ? 32 : kBlock), c.P, c.F / (fp4 ? 1 : kBlock)}, order, strides[1]);
    }
    if (packed.w_out != 0) {
      w_out = std::make_unique<PackedTensor>(E, c.D, c.F, packed.w_out, packed.scales, 2);
      const bool fp4 = w_out->is_fp4();
      views[2] = w_out->view({E, c.F, c.D}, {0, 2, 1}, strides[2]);
      views[3] = w_out->scales_view({E, c.F / (fp4 ? 32 : kBlock), c.D / (fp4 ? 1 : kBlock)}, {0, 2, 1}, strides[3]);
    }
  }

  // Sets the plain weights of the network to the unpacked values.
  void unpack() {
    if (w_in != nullptr) fill(*w_in, "w_in");
    if (w_out != nullptr) fill(*w_out, "w_out");
  }

  template <class Args>
  void pack(Args* args) const {
    if (w_in != nullptr) {
      args->w_in = &views[0];
      args->w_in_block_scales = &views[1];
    }
    if (w_out != nullptr) {
      args->w_out = &views[2];
      args->w_out_block_scales = &views[3];
    }
    if (packed.has_adapters) return;
    remove_in(args);
    remove_out(args);
  }
  ab_expert_ffn_forward_args forward_args() const {
    auto args = network.forward_args();
    pack(&args);
    return args;
  }
  ab_expert_ffn_backward_args backward_args() const {
    auto args = network.backward_args();
    pack(&args);
    if (w_in != nullptr) args.d_w_in = nullptr;
    if (w_out != nullptr) args.d_w_out = nullptr;
    return args;
  }

  LoraNetwork network;
  PackedCase packed;
  std::unique_ptr<PackedTensor> w_in;
  std::unique_ptr<PackedTensor> w_out;
  ab_tensor views[4];  // w_in and its scales, w_out and its scales
  int64_t strides[4][AB_MAX_RANK] = {};

 private:
  void fill(const PackedTensor& from, const char* name) {
    FloatTensor& memory = const_cast<FloatTensor&>(network[name].memory());
    for (int64_t i = 0; i < from.size(); ++i) memory.set(i, from.value(i));
  }
};

// Compares all results with those of the plain network, which must be finite and not all zero.
void expect_same_bits(const LoraCase& c, const PackedCase& packed, int threads = 0) {
  PackedNetwork got(c, packed);
  PackedNetwork want(c, packed);
  want.unpack();
  EXPECT_OK(LoraNetwork::run(got.forward_args(), threads));
  EXPECT_OK(LoraNetwork::run(got.backward_args(), threads));
  auto forward = want.network.forward_args();
  auto backward = want.network.backward_args();
  if (!packed.has_adapters) {
    remove_in(&forward);
    remove_out(&forward);
    remove_in(&backward);
    remove_out(&backward);
  }
  if (packed.w_in != 0) backward.d_w_in = nullptr;
  if (packed.w_out != 0) backward.d_w_out = nullptr;
  EXPECT_OK(LoraNetwork::run(forward));
  EXPECT_OK(LoraNetwork::run(backward));
  const std::string what = "D " + std::to_string(c.D) + " F " + std::to_string(c.F) + " P " + std::to_string(c.P) +
                           " dtype " + std::to_string(c.dtype) + " w_in " + std::to_string(packed.w_in) + " w_out " +
                           std::to_string(packed.w_out);
  expect_same(got.network, want.network, what, {"w_in", "w_out"});
  for (const char* name : {"y", "dx_rows"}) {
    double sum = 0;
    for (const double value : want.network[name].values()) sum += std::abs(value);
    EXPECT_TRUE(std::isfinite(sum) && sum > 0) << what << " " << name;
  }
}

constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

TEST(PackedNetwork, Mxfp4InEveryLayoutAndDtype) {
  for (const int32_t dtype : kDtypes) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t P : {1, 2}) {
        for (const bool has_adapters : {false, true}) {
          LoraCase c = case_of(dtype, interleaved);
          c.P = P;
          c.early = static_cast<int32_t>(P - 1);
          expect_same_bits(c, {.interleaved = interleaved, .has_adapters = has_adapters});
        }
      }
    }
  }
}

TEST(PackedNetwork, OneOfTheTwoWeights) {
  for (const int32_t dtype : kDtypes) {
    expect_same_bits(case_of(dtype, false), {.w_in = 0});
    expect_same_bits(case_of(dtype, false), {.w_out = 0});
  }
}

TEST(PackedNetwork, Fp8BlocksWithEveryKindOfScale) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t scales : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT8_E8M0, AB_UINT8}) {
      LoraCase c = case_of(dtype, false);
      c.D = 256;
      c.F = 128;
      expect_same_bits(c, {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = scales});
    }
    LoraCase c = case_of(dtype, false);
    c.D = c.F = 128;
    expect_same_bits(c, {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT4_E2M1X2});
  }
}

// Sums longer than a block of terms, several row tiles per expert, and strides that oneDNN treats specially.
TEST(PackedNetwork, LargerThanBlocksAndTiles) {
  struct Sizes {
    int64_t D, F;
  };
  for (const Sizes& s : {Sizes{1088, 608}, Sizes{544, 1056}, Sizes{128, 1280}}) {
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
      LoraCase c = case_of(dtype, s.F % 128 != 0);
      c.D = s.D;
      c.F = s.F;
      c.T = 150;
      c.R = 300;
      c.sizes = {280, 9};
      expect_same_bits(c, {.interleaved = s.F % 128 != 0});
      if (s.D % 128 == 0 && s.F % 128 == 0) {
        expect_same_bits(c, {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3, .scales = AB_FLOAT32});
      }
    }
  }
}

TEST(PackedNetwork, RowsInExpertOrderAndThreads) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    LoraCase c = case_of(dtype, false);
    c.by_slot = false;
    c.D = c.F = 256;
    c.R = 200;
    c.sizes = {60, 0, 1, 100};
    expect_same_bits(c, {}, 1);
    expect_same_bits(c, {.w_in = AB_FLOAT8_E4M3, .w_out = AB_FLOAT8_E4M3}, 3);
  }
}

TEST(PackedNetwork, CombinedGemmsOfBothPasses) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t packed_dtype : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
      for (const bool transposed : {false, true}) {
        const int64_t E = 3, T = 9, K = 2, R = 20, M = 128, C = 256;
        const int64_t D = transposed ? C : M;
        const int64_t N = transposed ? M : C;
        const PackedTensor packed(E, M, C, packed_dtype, AB_FLOAT8_E8M0, 3);
        FloatTensor plain({E, M, C}, dtype), x({R, D}, dtype), out({T, N}, dtype), want({T, N}, dtype);
        for (int64_t i = 0; i < plain.size(); ++i) plain.set(i, packed.value(i));
        x.fill_normal(4);
        const Ints slot_of_row({R}, mixed_slots(R, T * K));
        const Ints row_of_slot = invert(slot_of_row, T, K);
        const Ints sizes({E}, {11, 0, 7});
        int64_t strides[2][AB_MAX_RANK] = {};
        const bool fp4 = packed.is_fp4();
        const ab_tensor w = packed.view({E, M, C}, {0, 1, 2}, strides[0]);
        const ab_tensor scales =
            packed.scales_view({E, fp4 ? M : M / kBlock, C / (fp4 ? 32 : kBlock)}, {0, 1, 2}, strides[1]);
        ab_grouped_matmul_combine_args args{};
        args.size = sizeof(args);
        args.transpose_w = transposed ? 1 : 0;
        args.x = x.view();
        args.group_sizes = sizes.view();
        args.slot_of_row = slot_of_row.view();
        args.row_of_slot = row_of_slot.view();
        args.w = plain.view();
        args.out = want.view();
        EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
        args.w = &w;
        args.w_block_scales = &scales;
        args.out = out.view();
        EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
        EXPECT_TRUE(out.is(want)) << dtype << " " << packed_dtype << " " << transposed;
        args.w_block_scales = nullptr;
        EXPECT_REFUSED(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args), AB_INVALID_ARGUMENT,
                       "w_block_scales: got NULL");
        args.w = plain.view();
        args.w_block_scales = &scales;
        EXPECT_REFUSED(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args), AB_INVALID_ARGUMENT,
                       "w_block_scales: got a tensor, expected NULL since w is not packed");
      }
    }
  }
}

TEST(PackedNetwork, RefusesOtherArguments) {
  const PackedNetwork n(case_of(AB_BFLOAT16, false), {});
  auto args = n.forward_args();
  args.w_in_block_scales = nullptr;
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, "w_in_block_scales: got NULL");
  args = n.forward_args();
  args.w_out_block_scales = args.w_in_block_scales;
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, "w_out_block_scales: got float8_e8m0");
  args = n.forward_args();
  args.w_in = n.network.view("w_in");
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT,
                 "w_in_block_scales: got a tensor, expected NULL since w_in is not packed");
  args = n.forward_args();
  ab_tensor row_major = *args.w_in;
  row_major.strides = nullptr;
  args.w_in = &row_major;
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, "w_in: got unsupported strides");
  args = n.forward_args();
  row_major = *args.w_out;
  row_major.strides = nullptr;
  args.w_out = &row_major;
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, "w_out: got unsupported strides");
  args = n.forward_args();
  args.precision = AB_PRECISION_FP8;
  EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, "x: got D=96");
  auto backward = n.backward_args();
  backward.d_w_in = n.network.view("d_w_in");
  EXPECT_REFUSED(LoraNetwork::run(backward), AB_INVALID_ARGUMENT,
                 "d_w_in: got a tensor, expected NULL since w_in is packed");
  backward = n.backward_args();
  backward.d_w_out = n.network.view("d_w_out");
  EXPECT_REFUSED(LoraNetwork::run(backward), AB_INVALID_ARGUMENT,
                 "d_w_out: got a tensor, expected NULL since w_out is packed");
}

TEST(PackedNetwork, RefusesCutBlocks) {
  LoraCase c = case_of(AB_FLOAT32, false);
  c.D = 48;
  EXPECT_REFUSED(LoraNetwork::run(PackedNetwork(c, {}).forward_args()), AB_INVALID_ARGUMENT,
                 "w_in: got D=48, expected a multiple of 32");
  c = case_of(AB_FLOAT32, false);
  c.D = 128;
  EXPECT_REFUSED(LoraNetwork::run(PackedNetwork(c, {.w_in = AB_FLOAT8_E4M3}).forward_args()), AB_INVALID_ARGUMENT,
                 "w_in: got F=64, expected a multiple of 128");
  c = case_of(AB_FLOAT32, true);
  c.D = c.F = 128;
  EXPECT_REFUSED(LoraNetwork::run(PackedNetwork(c, {.w_in = AB_FLOAT8_E4M3, .interleaved = true}).forward_args()),
                 AB_INVALID_ARGUMENT, "w_in: got unsupported strides");
  c = in_fp8(AB_BFLOAT16);
  c.w_in = {0, 2, 3, 1};
  c.w_out = {0, 2, 1};
  EXPECT_REFUSED(LoraNetwork::run(PackedNetwork(c, {}).forward_args()), AB_INVALID_ARGUMENT, "w_in: got float4_e2m1x2");
}

}  // namespace
}  // namespace anabranch::testing
