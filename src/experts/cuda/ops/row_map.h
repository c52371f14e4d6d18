// Gather indices of a grouped GEMM: the assignment (token, k) of each row, and the row of tokens or cotangents it
// reads.
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch::cuda {

struct RowMap {
  bool by_slot = false;            // rows belong to assignments of tokens; else row r reads row r
  const int32_t* slots = nullptr;  // [R] if by_slot, on the device; may be nullptr if R = 0
  int32_t num_slots = 0;           // T K, or R
  int32_t topk = 1;
  Divisor by_topk;

  RowMap() = default;
  RowMap(const int32_t* slots_of_rows, int64_t slot_count, int64_t K)
      : by_slot(true),
        slots(slots_of_rows),
        num_slots(static_cast<int32_t>(slot_count)),
        topk(static_cast<int32_t>(K)),
        by_topk(topk) {}
  // Maps R rows in expert order or, with slot_of_row, the assignments of T tokens with K experts each. slot_of_row
  // decides even if its data is NULL, as in an empty tensor. Without assignments K is unused and may exceed int32.
  RowMap(const ab_tensor* slot_of_row, int64_t T, int64_t K, int64_t R)
      : RowMap(data<const int32_t>(slot_of_row), slot_of_row == nullptr ? R : T * K,
               slot_of_row == nullptr || T * K == 0 ? 1 : K) {
    by_slot = slot_of_row != nullptr;
  }

  // Returns the assignment of a row, or -1 for padding. Valid for any data on the device.
  AB_INLINE int32_t slot_of(int32_t row) const { return by_slot ? checked(slots[row]) : row; }
  AB_INLINE int32_t checked(int32_t slot) const { return slot >= 0 && slot < num_slots ? slot : -1; }
  AB_INLINE int32_t source_of(int32_t slot) const { return by_slot ? by_topk.quotient(slot) : slot; }

  // Number of source rows (tokens).
  AB_INLINE int32_t sources() const { return num_slots / topk; }
};

}  // namespace anabranch::cuda
