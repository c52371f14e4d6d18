// Expert MLPs on the small-M (decode) kernels of experts/few_rows, against the CPU.
#include "ffn_case.h"

namespace anabranch::testing {
namespace {

using FewRowsCuda = ExpertsCudaTest;

// Only some of many experts have rows; some have more rows than a kernel processes at a time.
void check_few_rows(int layout, int64_t P, int64_t D, int64_t F, unsigned seed) {
  std::vector<int32_t> sizes(48);
  sizes[3] = 1;
  sizes[4] = 2;
  sizes[17] = 19;
  sizes[46] = 8;
  sizes[47] = 9;
  FfnCase c{sizes, 45, D, F, P};
  if (seed % 3 != 0) {
    c.T = 19;
    c.K = 3;
  }
  c.dtype = seed % 4 == 0 ? AB_FLOAT16 : AB_BFLOAT16;
  c.layout = layout;
  c.activation = static_cast<int32_t>(seed % (P == 2 ? AB_SITU + 1 : AB_SWIGLU_CLAMPED));
  c.weighting = static_cast<Weighting>(seed % 3);
  c.biases = seed % 2 != 0;
  check(c, seed);
}

TEST_F(FewRowsCuda, WeightsLieInAnyLayout) {
  unsigned seed = 3000;
  for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
    for (const int64_t P : {1, 2}) {
      check_few_rows(layout, P, layout % 2 == 0 ? 64 : 128, P == 1 ? 72 : 64, ++seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(FewRowsCuda, ManyExperts) {
  unsigned seed = 4000;
  for (int layout = 0; layout < static_cast<int>(kLayouts.size()); ++layout) {
    for (const int64_t P : {1, 2}) {
      for (const auto& [D, F] : {std::pair<int64_t, int64_t>{64, 72}, {640, 192}, {72, 1088}}) {
        check_few_rows(layout, P, D, F, ++seed);
        if (HasFatalFailure()) return;
      }
    }
  }
  check_with_and_without_biases({{0, 1, 0, 0, 0, 0, 0, 1, 0}, 2, 2048, 768, 2, 1, 2});
  check_with_and_without_biases({{0, 1, 0, 0, 0, 0, 0, 1, 0}, 9, 64, 72, 2, 3, 3});
  check_with_and_without_biases({std::vector<int32_t>(300, 0), 300, 64, 72, 2, 100, 3});
  check_with_and_without_biases({std::vector<int32_t>(300, 1), 300, 64, 72, 2, 0, 0});
}

// The sums over D, over F and, with the first layout, of the gradient are long. 8 or 16 warps share each, and the
// k-steps do not divide evenly between them.
TEST_F(FewRowsCuda, LongSums) {
  std::vector<int32_t> sizes(12);
  sizes[1] = 1;
  sizes[4] = 9;
  sizes[11] = 2;
  for (const int layout : {0, 1, 3}) {
    for (const auto& [D, F] : {std::pair<int64_t, int64_t>{3592, 16}, {16, 3592}, {12296, 8}, {8, 12296}}) {
      FfnCase c{sizes, 13, D, F, 2, 8, 2};
      c.layout = layout;
      SCOPED_TRACE(::testing::Message() << c);
      const Network want(c);
      want.on_cpu();
      const Network got(c);
      got.on_gpu();
      if (HasFatalFailure()) return;
      compare_rows("y", want, got.y, want.y);
      compare_rows("h", want, got.h, want.h);
      compare_rows("dx_rows", want, got.dx_rows, want.dx_rows);
      if (HasFatalFailure()) return;
    }
  }
}

// Experts have padding rows, including whole row units of padding.
TEST_F(FewRowsCuda, PaddedExperts) {
  std::vector<int32_t> sizes(80);
  sizes[5] = 64;
  sizes[79] = 128;
  for (const int layout : {0, 1, 3}) {
    FfnCase c{sizes, 256, 64, 72, 2, 3, 2};
    c.layout = layout;
    check_with_and_without_biases(c);
    if (HasFatalFailure()) return;
  }
}

TEST_F(FewRowsCuda, GroupSizesAreClippedToTheRows) {
  for (const int layout : {0, 1}) {
    for (const int64_t K : {0, 2}) {
      for (std::vector<int32_t> sizes :
           {std::vector<int32_t>{-5, 3, INT32_MIN, 4, -1}, {2, INT32_MAX, INT32_MAX, 1}, {INT32_MAX, -1, INT32_MAX}}) {
        sizes.resize(600, INT32_MAX);
        FfnCase c{sizes, 600, 64, 8, 2, 300 * K, K};
        c.layout = layout;
        check_with_and_without_biases(c);
        c.sizes.resize(700);
        c.R = 20;
        c.T = 10 * K;
        check_with_and_without_biases(c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// NaN in a weight or a row does not reach padding, other experts or other rows.
TEST_F(FewRowsCuda, NanDoesNotSpread) {
  for (const int layout : {0, 1}) {
    for (const bool in_weights : {false, true}) {
      std::vector<int32_t> sizes(40);
      sizes[2] = 11;
      sizes[30] = 9;
      FfnCase c{sizes, 24, 64, 64, 2, in_weights ? 20 : 0, in_weights ? 2 : 0};
      c.layout = layout;
      Network net(c);
      constexpr int64_t kRow = 9;
      if (in_weights) {
        net.w_in.set(2 * net.w_in.size() / 40, std::numeric_limits<float>::quiet_NaN());
        net.w_out.set(2 * net.w_out.size() / 40, std::numeric_limits<float>::quiet_NaN());
      } else {
        net.x.set(kRow * c.D, std::numeric_limits<float>::quiet_NaN());
        net.saved_h.set(kRow * 2 * c.F, std::numeric_limits<float>::quiet_NaN());
      }
      net.on_gpu();
      for (int64_t r = 0; r < c.R; ++r) {
        bool has_nan = false;
        for (const FloatTensor* rows : {&net.y, &net.h, &net.dx_rows}) {
          const int64_t width = rows->size() / c.R;
          for (int64_t i = r * width; i < (r + 1) * width; ++i) {
            if (net.slot_of(r) < 0) {
              ASSERT_EQ(rows->get(i), 0.0f) << "padding row " << r;
            } else if (std::isnan(rows->get(i))) {
              has_nan = true;
            }
          }
        }
        ASSERT_EQ(has_nan, net.slot_of(r) >= 0 && (in_weights ? r < 11 : r == kRow)) << "row " << r;
      }
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
