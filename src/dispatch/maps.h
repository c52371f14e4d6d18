// The gather and scatter indices between slots and rows.
#pragma once

#include <cstdint>

#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch {

// Checked row_of_slot [T, K] and slot_of_row [R]. They are device data, so every entry is checked where it is used.
struct Maps {
  int64_t T = 0;
  int64_t K = 0;
  int64_t R = 0;
  int32_t* row_of_slot = nullptr;
  int32_t* slot_of_row = nullptr;

  AB_INLINE bool has_row(int64_t slot) const { return is_index(row_of_slot[slot], R); }
  // Whether both arrays link the slot and the row. A row has at most one such slot, and a slot at most one such row.
  AB_INLINE bool are_tied(int64_t slot, int64_t row) const {
    return row_of_slot[slot] == row && slot_of_row[row] == slot;
  }
  AB_INLINE bool is_filled(int64_t row) const {
    const int32_t slot = slot_of_row[row];
    return is_index(slot, T * K) && row_of_slot[slot] == row;
  }

  AB_INLINE static bool is_index(int32_t value, int64_t size) { return value >= 0 && value < size; }
};

// Checks row_of_slot [T, K], whose second axis has the name and size of K, and T*K < 2^31. T or K.size = -1: any size.
ab_status check_row_of_slot(const ab_tensor* row_of_slot, int64_t T, Axis K, Maps* maps);
// Checks slot_of_row [R] and R < 2^31.
ab_status check_slot_of_row(const ab_tensor* slot_of_row, Maps* maps);
// Check T*K < 2^31 and R < 2^31, because indices are int32.
ab_status check_num_slots(const char* name, int64_t T, int64_t K);
ab_status check_num_rows(const char* name, int64_t R);

}  // namespace anabranch
