// ANABRANCH_BF16=native on a CPU without bfloat16 instructions is an error. The library reads the environment once, so
// this test is a separate program.
#include <gtest/gtest.h>

#include <cstdlib>

#include "anabranch/experts.h"
#include "grouped_matmul_args.h"
#include "support.h"

namespace anabranch::testing {
namespace {

TEST(Bf16, NativeIsRefusedWithoutBf16Instructions) {
  setenv("ANABRANCH_BF16", "native", 1);
  setenv("ANABRANCH_ISA", "avx2", 1);
  char description[1024];
  ab_describe(description, sizeof(description));
  constexpr const char* kWhy = "ANABRANCH_BF16: got native, expected convert or unset, since there are no bfloat16";
  EXPECT_NE(std::strstr(description, kWhy), nullptr) << description;
  EXPECT_NE(std::strstr(description, "bf16=refused"), nullptr) << description;

  const Tensor<int32_t> groups({1}, std::vector<int32_t>{2});
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) {
    const Tensor<uint16_t> x({2, 2}, dtype), w({1, 2, 2}, dtype), y({2, 2}, dtype);
    const ab_grouped_matmul_args product = grouped_matmul_args(x.view(), w.view(), groups.view(), y.view());
    const ab_grouped_matmul_dw_args gradient{sizeof(gradient),     0, x.view(), y.view(), groups.view(), w.view(),
                                             AB_PRECISION_HIGHEST, 0};
    const ab_status product_status = call(ab_grouped_matmul, ab_grouped_matmul_workspace, product);
    const ab_status gradient_status = call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, gradient);
    if (dtype == AB_BFLOAT16) {
      EXPECT_REFUSED(product_status, AB_UNSUPPORTED, kWhy);
      EXPECT_REFUSED(gradient_status, AB_UNSUPPORTED, kWhy);
    } else {
      EXPECT_OK(product_status);
      EXPECT_OK(gradient_status);
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
