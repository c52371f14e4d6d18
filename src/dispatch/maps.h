// The two maps between slots and rows, and how much work a thread gets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/inline.h"
#include "core/tensor.h"
#include "core/threads.h"

namespace anabranch {

// row_of_slot [T, K] and slot_of_row [R] after their checks. Device data: every entry is checked where it is used.
struct Maps {
  int64_t T = 0;
  int64_t K = 0;
  int64_t R = 0;
  int32_t* row_of_slot = nullptr;
  int32_t* slot_of_row = nullptr;

  AB_INLINE bool has_row(int64_t slot) const { return is_index(row_of_slot[slot], R); }
  // Both maps tie the two together; true for at most one slot of a row and one row of a slot.
  AB_INLINE bool are_tied(int64_t slot, int64_t row) const {
    return row_of_slot[slot] == row && slot_of_row[row] == slot;
  }
  AB_INLINE bool is_filled(int64_t row) const {
    const int32_t slot = slot_of_row[row];
    return is_index(slot, T * K) && row_of_slot[slot] == row;
  }

  AB_INLINE static bool is_index(int32_t value, int64_t size) { return value >= 0 && value < size; }
};

// Checks row_of_slot [T, K], its axes' names and T*K < 2^31; T or K -1: any.
ab_status check_row_of_slot(const ab_tensor* row_of_slot, int64_t T, Axis K, Maps* maps);
// Checks slot_of_row [R] and R < 2^31.
ab_status check_slot_of_row(const ab_tensor* slot_of_row, Maps* maps);
// T*K < 2^31 and R < 2^31: indices are int32.
ab_status check_num_slots(const char* name, int64_t T, int64_t K);
ab_status check_num_rows(const char* name, int64_t R);

// A loop over `count` items that move `bytes_per_item` each, in blocks that are worth a hand-over between threads.
struct Blocks {
  static constexpr int64_t kBytes = 1 << 17;
  // Some 200 us of copying: less is not worth waking another thread, which may take as long.
  static constexpr int64_t kSerialBytes = 1 << 21;

  int64_t count;
  int64_t bytes;  // of all items
  int64_t size;

  Blocks(int64_t items, int64_t bytes_per_item)
      : count(items),
        bytes(items * bytes_per_item),
        size(std::clamp<int64_t>(kBytes / std::max<int64_t>(bytes_per_item, 1), 1, 1 << 14)) {}

  int threads(const ab_exec* exec) const { return bytes < kSerialBytes ? 1 : num_threads(exec); }
  int64_t blocks() const { return (count + size - 1) / size; }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(count, (block + 1) * size); }
};

}  // namespace anabranch
