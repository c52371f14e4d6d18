// Checked arguments of the plan, and the regions that groups of rows are clipped to.
#pragma once

#include <cstdint>

#include "anabranch/dispatch.h"
#include "core/inline.h"
#include "dispatch/maps.h"

namespace anabranch {

enum class SlotFormat { experts, byte_map, bit_map };

// Rows in num_destinations regions of equal size, each for an equal number of consecutive experts.
struct Regions {
  int64_t experts = 0;  // per region
  int64_t rows = 0;
  int64_t align = 1;

  AB_INLINE int64_t begin(int64_t expert) const { return expert / experts * rows; }
  AB_INLINE int64_t end(int64_t expert) const { return (expert / experts + 1) * rows; }
  AB_INLINE int64_t aligned(int64_t count) const { return (count + align - 1) / align * align; }
  // Clips a row to the region of an expert.
  AB_INLINE int64_t clip(int64_t expert, int64_t row) const { return row < end(expert) ? row : end(expert); }
};

// An index out of range stays out of range.
AB_INLINE int32_t narrow_index(int64_t index) {
  constexpr int64_t kMin = INT32_MIN, kMax = INT32_MAX;
  return static_cast<int32_t>(index < kMin ? kMin : index > kMax ? kMax : index);
}

struct PlanCall {
  SlotFormat format = SlotFormat::experts;
  const void* slots = nullptr;  // experts [T, K] of index_dtype, map [T, E] bool, or [T, ceil(E/8)] uint8
  int32_t index_dtype = AB_INT32;
  int64_t E = 0;
  bool is_part = false;  // `slots` has experts of other plans, too
  int32_t first_expert = 0;
  Regions regions;
  Maps maps;
  int32_t* tokens_per_expert = nullptr;
  int32_t* group_sizes = nullptr;
  int32_t* offsets = nullptr;
  int32_t* dropped = nullptr;
  int64_t num_dropped = 1;  // elements of `dropped`
  int32_t* row_id_map = nullptr;

  // Writes the number of dropped slots, if it is requested.
  AB_INLINE void write_dropped(int32_t number) const {
    if (dropped == nullptr) return;
    dropped[0] = number;
    for (int64_t i = 1; i < num_dropped; ++i) dropped[i] = 0;
  }

  // An element of `slots`. A GPU reads it from L2, because place_slots reads before it waits (core/cuda/launch.h).
  template <class T>
  AB_INLINE T entry(int64_t i) const {
#if defined(__CUDA_ARCH__)
    return __ldcg(static_cast<const T*>(slots) + i);
#else
    return static_cast<const T*>(slots)[i];
#endif
  }

  // An entry of `experts`, of type T, as an expert of this plan; -1: none. An index out of range stays out of range.
  template <class T>
  AB_INLINE int32_t expert_at(int64_t slot) const {
    const int32_t expert = narrow_index(entry<T>(slot));
    if (!is_part) return expert;
    const bool is_here = expert >= first_expert && int64_t{expert} - first_expert < E;
    return is_here ? expert - first_expert : -1;
  }
  AB_INLINE int32_t expert_at(int64_t slot) const {
    switch (index_dtype) {
      case AB_INT16: return expert_at<int16_t>(slot);
      case AB_INT64: return expert_at<int64_t>(slot);
      default: return expert_at<int32_t>(slot);
    }
  }

  // The expert of slot `slot` of token t; -1: none. An index out of range stays out of range.
  AB_INLINE int32_t expert_of(int64_t t, int64_t slot) const {
    const int64_t e = slot - t * maps.K;
    switch (format) {
      case SlotFormat::byte_map: return entry<uint8_t>(slot) != 0 ? static_cast<int32_t>(e) : -1;
      case SlotFormat::bit_map: {
        const uint8_t byte = entry<uint8_t>(t * ((E + 7) / 8) + e / 8);
        return (byte >> (e % 8) & 1) != 0 ? static_cast<int32_t>(e) : -1;
      }
      default: return expert_at(slot);
    }
  }
};

ab_status check_plan(const ab_plan_args* args, PlanCall* call);

}  // namespace anabranch
