// ab_unpack and ab_pack_mxfp4 against independent definitions.
#include <algorithm>
#include <cmath>
#include <string>

#include "experts_operands.h"
#include "float_tensor.h"
#include "packed_operands.h"

namespace anabranch::testing {
namespace {

constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

Bytes bytes_of(const std::vector<int64_t>& shape, int32_t dtype) { return Bytes(shape, dtype); }

ab_unpack_args args_of(const ab_tensor* packed, const ab_tensor* scales, const ab_tensor* w) {
  return {sizeof(ab_unpack_args), packed, scales, w};
}

ab_status run(const ab_unpack_args& args, int threads = 0) {
  return call(ab_unpack, ab_unpack_workspace, args, threads);
}
ab_status run(const ab_pack_mxfp4_args& args, int threads = 0) {
  return call(ab_pack_mxfp4, ab_pack_mxfp4_workspace, args, threads);
}

// Unpacks a tensor to w [M, N, C].
void unpack(const PackedTensor& packed, const FloatTensor& w, int threads = 0) {
  ab_tensor values{const_cast<uint8_t*>(packed.values.values().data()), packed.dtype, 3, {}, nullptr};
  ab_tensor scales{packed.scales_data(), packed.scales_dtype, 3, {}, nullptr};
  const int64_t n = packed.is_fp4() ? 1 : kBlock;
  const int64_t c = packed.is_fp4() ? 32 : kBlock;
  const int64_t shapes[2][3] = {{packed.M, packed.N, packed.C}, {packed.M, packed.N / n, packed.C / c}};
  std::copy_n(shapes[0], 3, values.shape);
  std::copy_n(shapes[1], 3, scales.shape);
  EXPECT_OK(run(args_of(&values, &scales, w.view()), threads));
}

struct Unpacked : FloatTensor {
  Unpacked(const PackedTensor& packed, int32_t dtype, int threads = 0)
      : FloatTensor({packed.M, packed.N, packed.C}, dtype) {
    unpack(packed, *this, threads);
  }
};

void expect_values(const PackedTensor& packed, int32_t dtype, const std::string& what) {
  FloatTensor want({packed.size()}, dtype);
  for (int64_t i = 0; i < packed.size(); ++i) want.set(i, packed.value(i));
  const Unpacked got(packed, dtype);
  for (int64_t i = 0; i < packed.size(); ++i) {
    const float a = got.get(i);
    const float b = want.get(i);
    ASSERT_TRUE(bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)))
        << what << " " << i << ": " << a << " " << b;
  }
}

// Each of the 256 scales has a block with all 16 codes.
TEST(Unpack, Mxfp4DecodesEveryCodeAndScale) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t scales : {AB_FLOAT8_E8M0, AB_UINT8}) {
      PackedTensor packed(1, 256, 32, AB_FLOAT4_E2M1X2, scales, 1);
      for (int64_t i = 0; i < packed.values.size(); ++i) packed.values[i] = static_cast<uint8_t>(2 * (i % 8) * 17 + 16);
      for (int64_t i = 0; i < 256; ++i) packed.byte_scales[i] = static_cast<uint8_t>(i);
      expect_values(packed, dtype, "dtype " + std::to_string(dtype));
    }
  }
}

// Scales 0 and 1 give denormal numbers. At scale 253, 4 and 6 overflow; at 254, 2, 3, 4 and 6 do.
TEST(Unpack, Mxfp4OverflowsAndKeepsDenormals) {
  PackedTensor packed(1, 3, 32, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
  for (int64_t i = 0; i < packed.values.size(); ++i) packed.values[i] = static_cast<uint8_t>(i % 8);  // then code 0
  packed.byte_scales.values() = {0, 253, 254};
  const Unpacked w(packed, AB_BFLOAT16);
  EXPECT_EQ(w.get(2), 0x1p-128f);
  for (int64_t code = 0; code < 8; ++code) {
    EXPECT_EQ(std::isinf(w.get(32 + 2 * code)), code >= 6) << code;
    EXPECT_EQ(std::isinf(w.get(64 + 2 * code)), code >= 4) << code;
  }
}

TEST(Unpack, Fp8BlocksDecodeEveryCodeAndKindOfScale) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t scales : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT8_E8M0, AB_UINT8}) {
      PackedTensor packed(2, 256, 384, AB_FLOAT8_E4M3, scales, 2);
      for (int64_t i = 0; i < packed.values.size(); ++i) packed.values[i] = static_cast<uint8_t>(i * 7 % 256);
      if (packed.has_byte_scales()) {
        packed.byte_scales.values() = {0, 1, 100, 127, 200, 250, 254, 255, 126, 128, 3, 90};
      } else {
        const float special[] = {3e38f, 1e-38f, 1.7e-3f, NAN, INFINITY, -0.5f, 0.0f};
        for (int64_t i = 0; i < 7; ++i) packed.float_scales->set(i, special[i]);
      }
      expect_values(packed, dtype, "dtype " + std::to_string(dtype) + " scales " + std::to_string(scales));
    }
  }
}

TEST(Unpack, ThreadsDoNotChangeBits) {
  const PackedTensor packed(3, 1000, 160, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 3);
  EXPECT_TRUE(Unpacked(packed, AB_BFLOAT16, 1).is(Unpacked(packed, AB_BFLOAT16, 3)));
}

// The nearest element, ties to the even code.
int nearest_code(double value) {
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double distance = std::abs(e2m1_value(code) - std::abs(value));
    const double best_distance = std::abs(e2m1_value(best) - std::abs(value));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 8 : 0);
}

// A block of random numbers in each row, then special ones.
void fill_to_pack(FloatTensor& w) {
  const int32_t dtype = w.dtype();
  w.fill_normal(5);
  const float tiny = dtype == AB_FLOAT16 ? 0x1p-24f : 0x1p-133f;
  for (int64_t j = 0; j < 32; ++j) {
    const auto place = [&](int64_t row, float value) { w.set(row * 32 + j, value); };
    place(0, j % 2 == 0 ? -0.0f : 0.0f);
    place(1, j == 7 ? INFINITY : 1.0f);
    place(2, j == 31 ? NAN : -1.0f);
    place(3, (j % 3 == 0 ? -tiny : tiny) * static_cast<float>(j));  // denormal numbers
    place(4, static_cast<float>(j) / 4);                            // ties, largest 7.75
    place(5, j == 0 ? 6.0f : -static_cast<float>(j) / 8);
    place(6, j == 0 ? 7.0f : 1.0f);  // clipped by the floor rule
    place(7, j == 0 ? (dtype == AB_FLOAT16 ? 65504.0f : 0x1.fep127f) : -0.0f);
    for (int64_t row = 8; row < 40; ++row)
      place(row, w.get(row * 32 + j) * std::ldexp(1.0f, static_cast<int>(row - 24)));
  }
}

TEST(PackMxfp4, MatchesTheRules) {
  constexpr int64_t kRows = 200;
  for (const int32_t dtype : kDtypes) {
    for (const int32_t rule : {AB_MXFP4_SCALES_FLOOR, AB_MXFP4_SCALES_CEIL}) {
      FloatTensor w({kRows, 32}, dtype);
      fill_to_pack(w);
      Bytes codes = bytes_of({kRows, 16}, AB_FLOAT4_E2M1X2);
      codes.mutable_view()->shape[1] = 32;
      const Bytes scales = bytes_of({kRows, 1}, AB_FLOAT8_E8M0);
      EXPECT_OK(run(ab_pack_mxfp4_args{sizeof(ab_pack_mxfp4_args), rule, w.view(), codes.view(), scales.view()}));
      for (int64_t row = 0; row < kRows; ++row) {
        double largest = 0;
        for (int64_t j = 0; j < 32; ++j) {
          const double magnitude = std::abs(static_cast<double>(w.get(row * 32 + j)));
          if (!(magnitude <= largest)) largest = magnitude;
          if (std::isnan(largest)) break;
        }
        const bool finite = std::isfinite(largest);
        const double exponent =
            rule == AB_MXFP4_SCALES_FLOOR ? std::floor(std::log2(largest)) - 2 : std::ceil(std::log2(largest / 6));
        const int k = largest == 0 ? -127 : finite ? static_cast<int>(std::clamp(exponent, -127.0, 127.0)) : 128;
        ASSERT_EQ(scales[row], k + 127) << row;
        for (int64_t j = 0; j < 32; ++j) {
          const int code = codes[(row * 32 + j) / 2] >> (4 * (j % 2)) & 15;
          const double value = std::ldexp(static_cast<double>(w.get(row * 32 + j)), -k);
          ASSERT_EQ(code, finite ? nearest_code(value) : 0) << row << " " << j << ": " << value;
        }
      }
    }
  }
}

// Values that are packed again decode to the same values.
TEST(PackMxfp4, RepeatsItself) {
  const PackedTensor packed(1, 300, 64, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 7);
  const Unpacked w(packed, AB_FLOAT32);
  ab_tensor matrix = *w.view();
  matrix.rank = 2;
  matrix.shape[0] = 300;
  matrix.shape[1] = 64;
  for (const int32_t rule : {AB_MXFP4_SCALES_FLOOR, AB_MXFP4_SCALES_CEIL}) {
    PackedTensor again(1, 300, 64, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 8);
    ab_tensor codes = *again.values.view();
    codes.dtype = AB_FLOAT4_E2M1X2;
    codes.rank = 2;
    codes.shape[0] = 300;
    codes.shape[1] = 64;
    ab_tensor scales = *again.byte_scales.view();
    scales.rank = 2;
    scales.shape[0] = 300;
    scales.shape[1] = 2;
    EXPECT_OK(run(ab_pack_mxfp4_args{sizeof(ab_pack_mxfp4_args), rule, &matrix, &codes, &scales}));
    EXPECT_TRUE(Unpacked(again, AB_FLOAT32).is(w)) << rule;
  }
}

TEST(Unpack, EmptyTensors) {
  for (const int64_t M : {0, 2}) {
    const PackedTensor packed(M, M == 0 ? 5 : 0, 64, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
    EXPECT_EQ(Unpacked(packed, AB_FLOAT32).size(), 0);
  }
}

TEST(Unpack, RefusesOtherArguments) {
  const PackedTensor fp4(2, 3, 64, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
  const Floats w({2, 3, 64});
  const Floats float_scales({2, 3, 2});
  Bytes codes = bytes_of({2, 3, 32}, AB_FLOAT4_E2M1X2);
  codes.mutable_view()->shape[2] = 64;
  const Bytes scales = bytes_of({2, 3, 2}, AB_FLOAT8_E8M0);
  const Bytes other = bytes_of({2, 3, 4}, AB_FLOAT8_E8M0);
  EXPECT_OK(run(args_of(codes.view(), scales.view(), w.view())));
  EXPECT_REFUSED(run(args_of(codes.view(), other.view(), w.view())), AB_INVALID_ARGUMENT,
                 "scales: got float8_e8m0 (11) [2, 3, 4], expected uint8 or float8_e8m0 [M=2, N=3, C/32=2]");
  EXPECT_REFUSED(run(args_of(codes.view(), float_scales.view(), w.view())), AB_INVALID_ARGUMENT, "scales: got float32");
  EXPECT_REFUSED(run(args_of(w.view(), scales.view(), w.view())), AB_INVALID_ARGUMENT,
                 "packed: got float32 (8) [2, 3, 64], expected float8_e4m3 or float4_e2m1x2 [M, N, C]");
  codes.mutable_view()->shape[2] = 48;
  EXPECT_REFUSED(run(args_of(codes.view(), scales.view(), w.view())), AB_INVALID_ARGUMENT,
                 "packed: got C=48, expected a multiple of 32");
  const Bytes q = e4m3({2, 128, 64});
  EXPECT_REFUSED(run(args_of(q.view(), scales.view(), w.view())), AB_INVALID_ARGUMENT,
                 "packed: got C=64, expected a multiple of 128");
  const Floats matrix({4, 64});
  EXPECT_REFUSED(run(ab_pack_mxfp4_args{sizeof(ab_pack_mxfp4_args), 2, matrix.view(), codes.view(), scales.view()}),
                 AB_INVALID_ARGUMENT, "scale_rule: got 2, expected 0 or 1");
}

}  // namespace
}  // namespace anabranch::testing
