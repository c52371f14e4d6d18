#include "dispatch/maps.h"

namespace anabranch {
namespace {

constexpr int64_t kIndexLimit = int64_t{1} << 31;

}  // namespace

ab_status check_num_slots(const char* name, int64_t T, int64_t K) {
  if (K > 0 && T > (kIndexLimit - 1) / K) {
    return AB_INVALID("%s: got %lld x %lld slots, expected fewer than 2^31", name, static_cast<long long>(T),
                      static_cast<long long>(K));
  }
  return ok();
}

ab_status check_num_rows(const char* name, int64_t R) {
  if (R < kIndexLimit) return ok();
  return AB_INVALID("%s: got %lld rows, expected fewer than 2^31", name, static_cast<long long>(R));
}

ab_status check_row_of_slot(const ab_tensor* row_of_slot, int64_t T, Axis K, Maps* maps) {
  AB_RETURN_IF_ERROR(check_tensor("row_of_slot", row_of_slot, kInt32, {{"T", T}, K}));
  maps->T = row_of_slot->shape[0];
  maps->K = row_of_slot->shape[1];
  maps->row_of_slot = data<int32_t>(row_of_slot);
  if (maps->K < 1) return AB_INVALID("row_of_slot: got %s 0, expected at least 1 slot per token", K.name);
  return check_num_slots("row_of_slot", maps->T, maps->K);
}

ab_status check_slot_of_row(const ab_tensor* slot_of_row, Maps* maps) {
  AB_RETURN_IF_ERROR(check_tensor("slot_of_row", slot_of_row, kInt32, {{"R"}}));
  maps->R = slot_of_row->shape[0];
  maps->slot_of_row = data<int32_t>(slot_of_row);
  return check_num_rows("slot_of_row", maps->R);
}

}  // namespace anabranch
