// Which slot each row of a grouped product belongs to, and which row of tokens or cotangents it reads.
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch::cuda {

struct RowMap {
  bool by_slot = false;            // rows belong to slots of tokens; else row r is slot r and reads row r
  const int32_t* slots = nullptr;  // [R] with by_slot, on the device; may be nullptr where R = 0
  int32_t num_slots = 0;           // T K, or R
  int32_t topk = 1;
  Divisor by_topk;

  RowMap() = default;
  RowMap(const int32_t* slots_of_rows, int64_t slots_there_are, int64_t K)
      : by_slot(true),
        slots(slots_of_rows),
        num_slots(static_cast<int32_t>(slots_there_are)),
        topk(static_cast<int32_t>(K)),
        by_topk(topk) {}
  // Of R rows, or with slot_of_row of tokens' slots: T tokens of K each. The tensor decides, not its data, which is
  // NULL where it is empty. Without a slot K divides nothing, and may be too large for an int32.
  RowMap(const ab_tensor* slot_of_row, int64_t T, int64_t K, int64_t R)
      : RowMap(data<const int32_t>(slot_of_row), slot_of_row == nullptr ? R : T * K,
               slot_of_row == nullptr || T * K == 0 ? 1 : K) {
    by_slot = slot_of_row != nullptr;
  }

  // Whatever the device's data is; -1: the row is padding.
  AB_INLINE int32_t slot_of(int32_t row) const { return by_slot ? checked(slots[row]) : row; }
  AB_INLINE int32_t checked(int32_t slot) const { return slot >= 0 && slot < num_slots ? slot : -1; }
  AB_INLINE int32_t source_of(int32_t slot) const { return by_slot ? by_topk.quotient(slot) : slot; }

  // Rows of what is read: tokens.
  AB_INLINE int32_t sources() const { return num_slots / topk; }
};

}  // namespace anabranch::cuda
