#include "experts/packed_check.h"

namespace anabranch {
namespace {

constexpr Order kRowMajor{{0, 1, 2}};
constexpr Dtypes kFp4 = dtype_bit(AB_FLOAT4_E2M1X2);

}  // namespace

ab_status check_packed_axis(const char* name, const char* axis, int64_t size, int64_t block) {
  if (size % block == 0) return ok();
  return AB_INVALID("%s: got %s=%lld, expected a multiple of %lld, the size of a block of packed weights", name, axis,
                    static_cast<long long>(size), static_cast<long long>(block));
}

ab_status check_block_scales(const char* name, const ab_tensor* scales, int32_t packed_dtype,
                             std::initializer_list<Axis> shape, const Order& order) {
  const Dtypes dtypes = packed_dtype == AB_FLOAT4_E2M1X2 ? kE8m0 : kE8m0 | kFloat32 | dtype_bit(AB_BFLOAT16);
  size_t match = 0;
  return check_ordered(name, scales, dtypes, shape, {&order, 1}, &match);
}

ab_status check(const ab_pack_mxfp4_args* args, PackedSizes* s) {
  if (args->scale_rule != AB_MXFP4_SCALES_FLOOR && args->scale_rule != AB_MXFP4_SCALES_CEIL) {
    return AB_INVALID("scale_rule: got %d, expected %d or %d, an ab_mxfp4_scales", args->scale_rule,
                      AB_MXFP4_SCALES_FLOOR, AB_MXFP4_SCALES_CEIL);
  }
  AB_RETURN_IF_ERROR(check_tensor("w", args->w, kFloats, {{"M"}, {"C"}}));
  *s = {args->w->shape[0], 1, args->w->shape[1]};
  AB_RETURN_IF_ERROR(check_packed_axis("w", "C", s->C, kMxBlock));
  AB_RETURN_IF_ERROR(check_tensor("codes", args->codes, kFp4, {{"M", s->M}, {"C", s->C}}));
  return check_tensor("scales", args->scales, kE8m0, {{"M", s->M}, {"C/32", s->C / kMxBlock}});
}

ab_status check(const ab_unpack_args* args, PackedSizes* s) {
  AB_RETURN_IF_ERROR(check_tensor("packed", args->packed, kPacked, {{"M"}, {"N"}, {"C"}}));
  *s = {args->packed->shape[0], args->packed->shape[1], args->packed->shape[2]};
  const int32_t dtype = args->packed->dtype;
  if (dtype == AB_FLOAT4_E2M1X2) {
    AB_RETURN_IF_ERROR(check_packed_axis("packed", "C", s->C, kMxBlock));
    AB_RETURN_IF_ERROR(check_block_scales("scales", args->scales, dtype,
                                          {{"M", s->M}, {"N", s->N}, {"C/32", s->C / kMxBlock}}, kRowMajor));
  } else {
    AB_RETURN_IF_ERROR(check_packed_axis("packed", "N", s->N, kScaleBlock));
    AB_RETURN_IF_ERROR(check_packed_axis("packed", "C", s->C, kScaleBlock));
    AB_RETURN_IF_ERROR(check_block_scales("scales", args->scales, dtype,
                                          {{"M", s->M}, {"N/128", s->N / kScaleBlock}, {"C/128", s->C / kScaleBlock}},
                                          kRowMajor));
  }
  return check_tensor("w", args->w, kFloats, {{"M", s->M}, {"N", s->N}, {"C", s->C}});
}

}  // namespace anabranch
