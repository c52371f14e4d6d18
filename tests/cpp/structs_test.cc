// Structs from callers that were compiled against an older or newer header than the library.
#include "core/structs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "support.h"

namespace anabranch::testing {
namespace {

// The struct of an operation in three versions of a header. The library knows the second.
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

ab_status take(const void* given, Second* to) {
  constexpr size_t kSizes[] = {sizeof(First), sizeof(Second)};
  return take_struct("args", given, kSizes, to);
}

TEST(Structs, OfAnOlderHeaderHaveZerosAtTheEnd) {
  const int x = 1;
  const First older{sizeof(First), &x};
  Second taken{{9, nullptr}, &x};
  EXPECT_OK(take(&older, &taken));
  EXPECT_EQ(taken.x, &x);
  EXPECT_EQ(taken.y, nullptr);
  EXPECT_EQ(taken.size, sizeof(Second));
}

TEST(Structs, OfANewerHeaderMustEndWithZeros) {
  const int x = 1;
  Third newer{{{sizeof(Third), &x}, &x}, nullptr};
  Second taken{};
  EXPECT_OK(take(&newer, &taken));
  EXPECT_EQ(taken.y, &x);
  newer.z = reinterpret_cast<const void*>(uintptr_t{0x0100});
  EXPECT_REFUSED(take(&newer, &taken), AB_UNSUPPORTED, "args: got size 32 with a value in byte 25, expected zeros");
}

TEST(Structs, MustNotBeNull) {
  Second taken{};
  EXPECT_REFUSED(take(nullptr, &taken), AB_INVALID_ARGUMENT, "args: got NULL");
}

// A size is accepted if a released header has it, or if it is a larger multiple of 8 and the extra bytes are zero. Each
// struct is allocated at its exact size, so AddressSanitizer detects a read past it.
template <class Struct>
void check_every_size(size_t released, ab_status (*run)(const Struct*)) {
  const std::string name = StructOf<Struct>::kName;
  for (size_t size = 0; size <= 4200; ++size) {
    const bool is_accepted =
        size == released || size == sizeof(Struct) || (size > sizeof(Struct) && size <= 4096 && size % 8 == 0);
    const size_t bytes = std::max(size, sizeof(size_t));
    const std::unique_ptr<void, void (*)(void*)> memory(std::malloc(bytes), std::free);
    std::memset(memory.get(), 0xff, bytes);
    std::memcpy(memory.get(), &size, sizeof(size));
    const Struct* given = static_cast<const Struct*>(memory.get());
    if (!is_accepted) {
      const ab_status status = run(given);
      EXPECT_EQ(status.code, AB_INVALID_ARGUMENT) << name << " of " << size << " bytes";
      EXPECT_EQ(std::string(status.message).find(name + ": got size " + std::to_string(size) + ", "), 0u)
          << status.message;
      continue;
    }
    if (size > sizeof(Struct)) {
      EXPECT_EQ(run(given).code, AB_UNSUPPORTED) << name << " of " << size << " bytes";
      std::memset(static_cast<char*>(memory.get()) + sizeof(Struct), 0, size - sizeof(Struct));
    }
    Struct taken{};
    EXPECT_OK(take_struct(given, &taken));
    EXPECT_EQ(taken.size, sizeof(Struct));
    const size_t given_bytes = std::min(size, sizeof(Struct));
    const char* fields = reinterpret_cast<const char*>(&taken);
    EXPECT_EQ(std::count(fields + sizeof(size_t), fields + given_bytes, '\xff'), given_bytes - sizeof(size_t));
    EXPECT_EQ(std::count(fields + given_bytes, fields + sizeof(Struct), '\0'), sizeof(Struct) - given_bytes);
  }
}

// released: the size in version 0.1.0, or in the first release that has the operation.
template <auto kOperation, class Args>
void check_args(size_t released, ab_status (*)(const Args*, const ab_exec*)) {
  check_every_size<Args>(released, [](const Args* args) { return kOperation(args, nullptr); });
}
#define CHECK_ARGS(operation, released) check_args<operation>(released, operation)

TEST(Structs, OfEverySizeAreAcceptedOrRefused) {
  CHECK_ARGS(ab_router_forward, 128);
  CHECK_ARGS(ab_router_backward, 104);
  CHECK_ARGS(ab_load_balance_loss, 56);
  CHECK_ARGS(ab_moe_aux_loss, 72);
  CHECK_ARGS(ab_score_sum, 24);
  CHECK_ARGS(ab_plan, 96);
  CHECK_ARGS(ab_dispatch, 48);
  CHECK_ARGS(ab_combine, 48);
  CHECK_ARGS(ab_combine_backward, 64);
  CHECK_ARGS(ab_sort_chunks, 56);
  CHECK_ARGS(ab_expand_row_id_map, 40);
  CHECK_ARGS(ab_quantize_rows, 40);
  CHECK_ARGS(ab_quantize_weights, 48);
  CHECK_ARGS(ab_pack_mxfp4, 40);
  CHECK_ARGS(ab_unpack, 32);
  CHECK_ARGS(ab_grouped_matmul, 48);
  CHECK_ARGS(ab_grouped_matmul_dw, 48);
  CHECK_ARGS(ab_grouped_matmul_combine, 96);
  CHECK_ARGS(ab_expert_ffn_forward, 112);
  CHECK_ARGS(ab_expert_ffn_backward, 160);
  check_every_size<ab_exec>(40, [](const ab_exec* exec) {
    const Tensor<float> scores({1, 1}, {1});
    const Tensor<float> sum({1});
    const ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
    return ab_score_sum(&args, exec);
  });
}

// Checks the same rules through an operation: score_sum with larger structs.
TEST(Structs, OfAnOperationMayBeLarger) {
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
