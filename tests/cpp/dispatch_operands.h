// Operands shared by the tests of plan, dispatch, combine and chunk sort.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "anabranch/dispatch.h"
#include "support.h"

namespace anabranch::testing {

constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
constexpr int32_t kFloatDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

inline std::vector<float> normal(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = distribution(random);
  return values;
}

inline std::vector<int32_t> indices(int64_t size, int32_t low, int32_t high, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> distribution(low, high);
  std::vector<int32_t> values(static_cast<size_t>(size));
  for (int32_t& value : values) value = distribution(random);
  return values;
}

// Arbitrary contents of an index buffer: small, large, negative and extreme values.
inline std::vector<int32_t> garbage(int64_t size, int64_t limit, uint32_t seed) {
  std::vector<int32_t> values = indices(size, -3, static_cast<int32_t>(limit) + 3, seed);
  for (size_t i = 0; i < values.size(); i += 5) values[i] = i % 2 == 0 ? kLowest : kLargest;
  return values;
}

struct Plan {
  Tensor<int32_t> tokens_per_expert, group_sizes, offsets, row_of_slot, slot_of_row, dropped;

  Plan(int64_t T, int64_t K, int64_t E, int64_t R)
      : tokens_per_expert({E}),
        group_sizes({E}),
        offsets({E + 1}),
        row_of_slot({T, K}),
        slot_of_row({R}),
        dropped(std::vector<int64_t>{}) {}

  std::vector<std::vector<int32_t>> values() const {
    return {tokens_per_expert.values(), group_sizes.values(), offsets.values(),
            row_of_slot.values(),       slot_of_row.values(), dropped.values()};
  }
};

inline ab_plan_args plan_args(const Tensor<int32_t>* experts, const Tensor<uint8_t>* routing_map, int64_t E,
                              int32_t align, const Plan& plan) {
  ab_plan_args args{};
  args.size = sizeof(args);
  args.num_experts = static_cast<int32_t>(E);
  args.align_size = align;
  args.experts = experts == nullptr ? nullptr : experts->view();
  args.routing_map = routing_map == nullptr ? nullptr : routing_map->view();
  args.tokens_per_expert = plan.tokens_per_expert.view();
  args.group_sizes = plan.group_sizes.view();
  args.offsets = plan.offsets.view();
  args.row_of_slot = plan.row_of_slot.view();
  args.slot_of_row = plan.slot_of_row.view();
  args.dropped = plan.dropped.view();
  return args;
}

}  // namespace anabranch::testing
