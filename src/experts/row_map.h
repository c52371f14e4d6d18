// Which slot each row of a feed-forward network belongs to, and which row of tokens or cotangents it reads.
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/floats.h"
#include "core/inline.h"
#include "experts/check.h"
#include "experts/hopper/ffn_product.h"

namespace anabranch::cuda {

struct RowMap {
  const int32_t* slots = nullptr;  // [R], on the device; nullptr: row r is slot r and reads row r
  int32_t num_slots = 0;           // T K, or R
  int32_t topk = 1;
  Divisor by_topk;

  RowMap() = default;
  RowMap(const ab_tensor* slot_of_row, const FfnSizes& s)
      : slots(data<const int32_t>(slot_of_row)),
        num_slots(static_cast<int32_t>(slot_of_row == nullptr ? s.R : s.slots())),
        topk(slot_of_row == nullptr ? 1 : static_cast<int32_t>(s.K)),
        by_topk(topk) {}

  // Whatever the device's data is; -1: the row is padding.
  AB_INLINE int32_t slot_of(int32_t row) const {
    if (slots == nullptr) return row;
    const int32_t slot = slots[row];
    return slot >= 0 && slot < num_slots ? slot : -1;
  }
  AB_INLINE int32_t source_of(int32_t slot) const { return slots == nullptr ? slot : by_topk.quotient(slot); }

  // The rows of a matrix in this order.
  RowSource rows_of(const void* matrix) const { return {matrix, slots, topk, num_slots / topk}; }
  // Their weights, of slots.
  RowWeightSource weights_of(const Floats& weights) const { return {slots, num_slots, weights.data, weights.dtype}; }

  // What a product of the network on the tensor cores needs of them and of its sizes.
  FfnProduct product_of(const FfnSizes& s, const int32_t* group_sizes, const Floats& weights, int32_t activation,
                        int32_t dtype) const {
    return {group_sizes, weights_of(weights), activation, dtype, s.R, s.E, s.D, s.P, s.F};
  }
};

}  // namespace anabranch::cuda
