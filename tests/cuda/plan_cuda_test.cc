// The plan on the GPU against the CPU. All integers must be equal.
#include <algorithm>
#include <random>

#include "anabranch/cuda.h"
#include "device.h"

namespace anabranch::testing {
namespace {

enum class Slots { experts, byte_map, bit_map };

struct Case {
  int64_t T = 64;
  int64_t K = 4;
  int32_t E = 16;
  int32_t align = 0;
  int32_t destinations = 0;
  int64_t rows = -1;  // rows per destination; -1: enough for all assignments
  double skew = 0.0;  // fraction of assignments to expert 0
  Slots slots = Slots::experts;
  int32_t first_expert = -1;  // of the plan's part of all experts; -1: all
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "T " << c.T << " K " << c.K << " E " << c.E << " align " << c.align << " destinations "
             << c.destinations << " first expert " << c.first_expert << " rows " << c.rows << " skew " << c.skew
             << " slots " << static_cast<int>(c.slots);
}

struct Result {
  Result(int64_t T, int64_t K, int64_t E, int64_t R)
      : tokens_per_expert({E}),
        group_sizes({E}),
        offsets({E + 1}),
        row_of_slot({T, K}),
        slot_of_row({R}),
        dropped({3}),
        row_id_map({T, 2 * E + 1}) {}
  Tensor<int32_t> tokens_per_expert;
  Tensor<int32_t> group_sizes;
  Tensor<int32_t> offsets;
  Tensor<int32_t> row_of_slot;
  Tensor<int32_t> slot_of_row;
  Tensor<int32_t> dropped;
  Tensor<int32_t> row_id_map;

  void request(ab_plan_args* args, bool ids) const {
    args->tokens_per_expert = tokens_per_expert.view();
    args->group_sizes = group_sizes.view();
    args->offsets = offsets.view();
    args->row_of_slot = row_of_slot.view();
    args->slot_of_row = slot_of_row.view();
    args->dropped = dropped.view();
    args->row_id_map = ids ? row_id_map.view() : nullptr;
  }
};

void check(const Case& c, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << c);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Tensor<int32_t> experts({c.T, c.K});
  Tensor<int16_t> narrow_experts({c.T, c.K});
  Tensor<int64_t> wide_experts({c.T, c.K});
  Tensor<uint8_t> bytes({c.T, c.E}, AB_BOOL);
  Tensor<uint8_t> bits({c.T, (c.E + 7) / 8});
  for (int64_t i = 0; i < experts.size(); ++i) {
    experts[i] = uniform(random) < c.skew ? 0 : static_cast<int32_t>(random() % static_cast<unsigned>(c.E + 3)) - 1;
    if (random() % 200 == 0) experts[i] = random() % 2 == 0 ? INT32_MIN : INT32_MAX;
    narrow_experts[i] = static_cast<int16_t>(std::clamp(experts[i], INT16_MIN, INT16_MAX));
    // Among others 2^32, which is 0 in its last 32 bits.
    wide_experts[i] = int64_t{experts[i]} + (random() % 50 == 0 ? int64_t{1} << 32 : 0);
  }
  for (int64_t i = 0; i < bytes.size(); ++i) bytes[i] = uniform(random) < static_cast<double>(c.K) / c.E;
  for (uint8_t& byte : bits.values()) byte = 0;
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t e = 0; e < c.E; ++e) {
      uint8_t& byte = bits[t * ((c.E + 7) / 8) + e / 8];
      if (bytes[t * c.E + e] != 0) byte = static_cast<uint8_t>(byte | 1u << (e % 8));
    }
  }
  const int64_t K = c.slots == Slots::experts ? c.K : c.E;
  const int64_t a = std::max(c.align, 1);
  const int64_t P = std::max(c.destinations, 1);
  const int64_t R = P * (c.rows >= 0 ? c.rows / a * a : (c.T * K + c.E * (a - 1)) / a * a);

  ab_plan_args args{};
  args.size = sizeof(args);
  args.num_experts = c.E;
  args.align_size = c.align;
  args.num_destinations = c.destinations;
  args.is_part = c.first_expert >= 0 ? 1 : 0;
  args.first_expert = std::max(c.first_expert, 0);
  if (c.slots == Slots::experts) {
    const ab_tensor* const views[] = {experts.view(), narrow_experts.view(), wide_experts.view()};
    args.experts = views[seed % 3];
  }
  if (c.slots == Slots::byte_map) args.routing_map = bytes.view();
  if (c.slots == Slots::bit_map) args.routing_map = bits.view();
  const bool ids = c.slots != Slots::experts;
  const Result want(c.T, K, c.E, R);
  want.request(&args, ids);
  EXPECT_OK(call(ab_plan, ab_plan_workspace, args));

  const Result got(c.T, K, c.E, R);
  got.request(&args, ids);
  Mirrors mirrors;
  for (const ab_tensor** tensor :
       {&args.experts, &args.routing_map, &args.tokens_per_expert, &args.group_sizes, &args.offsets, &args.row_of_slot,
        &args.slot_of_row, &args.dropped, &args.row_id_map}) {
    *tensor = mirrors.add(*tensor);
  }
  size_t size = 0;
  EXPECT_OK(ab_cuda_plan_workspace(&args, nullptr, &size));
  DeviceWorkspace workspace(size);
  EXPECT_OK(ab_cuda_plan(&args, &workspace.exec()));
  mirrors.fetch();
  workspace.check();
  ASSERT_EQ(got.tokens_per_expert.values(), want.tokens_per_expert.values());
  ASSERT_EQ(got.group_sizes.values(), want.group_sizes.values());
  ASSERT_EQ(got.offsets.values(), want.offsets.values());
  ASSERT_EQ(got.dropped.values(), want.dropped.values());
  ASSERT_TRUE(got.row_of_slot.values() == want.row_of_slot.values()) << "row_of_slot";
  ASSERT_TRUE(got.slot_of_row.values() == want.slot_of_row.values()) << "slot_of_row";
  ASSERT_TRUE(!ids || got.row_id_map.values() == want.row_id_map.values()) << "row_id_map";
}

class PlanCuda : public CudaTest {};

TEST_F(PlanCuda, MatchesTheCpuForEveryShape) {
  unsigned seed = 0;
  for (const int64_t T : {0, 1, 7, 300, 5000}) {
    for (const int32_t E : {1, 3, 8, 64, 130, 512, 3000}) {
      for (const int32_t align : {0, 8, 128}) {
        for (const double skew : {0.0, 0.9, 1.0}) {
          if (T == 5000 && E > 512) continue;
          check({T, 1 + static_cast<int64_t>(++seed % 8), E, align, 0, -1, skew}, seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(PlanCuda, BoundedRowsAndDestinations) {
  unsigned seed = 50;
  for (const int32_t destinations : {0, 1, 2, 4}) {
    for (const int64_t rows : {0, 40, 400, 4000, -1}) {
      for (const int32_t align : {0, 8}) {
        check({700, 4, 32, align, destinations, rows, seed % 3 == 0 ? 0.5 : 0.0}, ++seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(PlanCuda, SizesAroundTheLimitsOfOneBlock) {
  unsigned seed = 200;
  for (const Case& c : {Case{256, 8, 128}, Case{2048, 1, 384}, Case{2049, 1, 384}, Case{2048, 1, 385}, Case{1, 8, 1536},
                        Case{1, 8, 1537}, Case{257, 8, 128, 0, 0, 1500}}) {
    for (const double skew : {0.0, 0.9}) {
      Case skewed = c;
      skewed.skew = skew;
      check(skewed, ++seed);
      if (HasFatalFailure()) return;
    }
  }
  for (const int64_t rows : {8192, 8193}) {
    check({250, 8, 64, 0, 0, rows}, ++seed);
    if (HasFatalFailure()) return;
  }
  for (const int64_t T : {40, 3000}) {
    for (const int32_t first : {0, 3, 7})
      check({.T = T, .K = 2, .E = 8, .first_expert = first}, static_cast<unsigned>(T + first));
  }
}

TEST_F(PlanCuda, RoutingMaps) {
  unsigned seed = 90;
  for (const Slots slots : {Slots::byte_map, Slots::bit_map}) {
    for (const int64_t T : {0, 1, 65, 700}) {
      for (const int32_t E : {1, 8, 33, 130, 1500}) {
        for (const int64_t rows : {int64_t{-1}, int64_t{200}}) {
          check({T, 3, E, static_cast<int32_t>(seed % 2 * 8), 0, rows, 0.0, slots}, ++seed);
          if (HasFatalFailure()) return;
        }
      }
    }
    for (const int32_t destinations : {2, 4}) {
      check({700, 3, 32, 8, destinations, 4000, 0.0, slots}, ++seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(PlanCuda, MoreAssignmentsPerWarpThanFitInRegisters) {
  check({20000, 8, 8192, 8, 0, -1, 0.5}, 1);
  check({40, 3, 8192, 0, 0, -1, 0.0, Slots::byte_map}, 2);
}

}  // namespace
}  // namespace anabranch::testing
