// Rows of an operand, and what the caller knows of them.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// R rows: those of a matrix, or with `slots` elsewhere: row r is row slots[r] / slots_per_row of the matrix, zero where
// that is none of its source_rows.
struct RowSource {
  const void* data = nullptr;
  const int32_t* slots = nullptr;  // [R], on the device
  int64_t slots_per_row = 1;
  int64_t source_rows = 0;
};

// Weights of R rows: with `slots` those of the rows' slots, of which there are so many; a row without one is padding.
struct RowWeightSource {
  const int32_t* slots = nullptr;  // [R], on the device; nullptr: no row is padding
  int64_t num_slots = 0;
  const void* weights = nullptr;  // of slots, or without slots of rows; nullptr: 1
  int32_t dtype = 0;              // of the weights, any float dtype
};

}  // namespace anabranch::cuda
