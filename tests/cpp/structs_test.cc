// Structs of callers that were compiled against another header than the library.
#include "core/structs.h"

#include <gtest/gtest.h>

#include <array>

#include "support.h"

namespace anabranch::testing {
namespace {

// An operation's struct as three headers have it; the library is of the second.
struct First {
  size_t size;
  const void* x;
};
struct Second : First {
  const void* y;
};
struct Third : Second {
  const void* z;
};

ab_status take(const void* given, Second* to) { return take_struct("args", given, sizeof(First), sizeof(Second), to); }

TEST(Structs, LackWhatAnOlderHeaderLacks) {
  const int x = 1;
  const First older{sizeof(First), &x};
  Second taken{{9, nullptr}, &x};
  EXPECT_OK(take(&older, &taken));
  EXPECT_EQ(taken.x, &x);
  EXPECT_EQ(taken.y, nullptr);
  EXPECT_EQ(taken.size, sizeof(Second));
}

TEST(Structs, MayHaveZerosThatOnlyANewerHeaderKnows) {
  const int x = 1;
  Third newer{{{sizeof(Third), &x}, &x}, nullptr};
  Second taken{};
  EXPECT_OK(take(&newer, &taken));
  EXPECT_EQ(taken.y, &x);
  newer.z = reinterpret_cast<const void*>(uintptr_t{0x0100});
  EXPECT_REFUSED(take(&newer, &taken), AB_UNSUPPORTED, "args: got size 32 with a value in byte 25, expected zeros");
}

TEST(Structs, HaveASizeThatAStructCanHave) {
  Second taken{};
  for (const size_t size : {size_t{0}, sizeof(First) - 1, size_t{4097}, SIZE_MAX}) {
    const First wrong{size, nullptr};
    EXPECT_REFUSED(take(&wrong, &taken), AB_INVALID_ARGUMENT,
                   ("args: got size " + std::to_string(size) + ", expected 24, or at least 16").c_str());
  }
  EXPECT_REFUSED(take(nullptr, &taken), AB_INVALID_ARGUMENT, "args: got NULL");
}

// Every operation takes its struct so: a score_sum with room behind its args.
TEST(Structs, OfAnOperationMayGrow) {
  const Tensor<float> scores({2, 3}, {1, 2, 3, 4, 5, 6});
  const Tensor<float> sum({3});
  struct {
    ab_score_sum_args args;
    size_t more[4];
  } newer{{sizeof(newer), scores.view(), sum.view()}, {}};
  alignas(64) std::array<char, 64> workspace;
  struct {
    ab_exec exec;
    size_t more[2];
  } exec{{sizeof(exec), 1, nullptr, workspace.data(), workspace.size()}, {}};
  EXPECT_OK(ab_score_sum(&newer.args, &exec.exec));
  EXPECT_EQ(sum.values(), (std::vector<float>{5, 7, 9}));

  newer.more[3] = 1;
  EXPECT_REFUSED(ab_score_sum(&newer.args, &exec.exec), AB_UNSUPPORTED,
                 "ab_score_sum_args: got size 56 with a value in byte 48");
  newer.more[3] = 0;
  exec.more[0] = 1;
  EXPECT_REFUSED(ab_score_sum(&newer.args, &exec.exec), AB_UNSUPPORTED, "ab_exec: got size 56 with a value in byte 40");
  exec.exec.size = 12345;
  EXPECT_REFUSED(ab_score_sum(&newer.args, &exec.exec), AB_INVALID_ARGUMENT, "ab_exec: got size 12345");
}

}  // namespace
}  // namespace anabranch::testing
