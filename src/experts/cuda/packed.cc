// ab_cuda_pack_mxfp4 and ab_cuda_unpack.
#include "experts/cuda/packed.h"

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"

using namespace anabranch;

extern "C" {

ab_status ab_cuda_pack_mxfp4_workspace(const ab_pack_mxfp4_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_cuda_pack_mxfp4(const ab_pack_mxfp4_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device("pack_mxfp4", &device));
  return cuda::pack_mxfp4(args->w->data, args->w->dtype, s.M * (s.C / kMxBlock),
                          args->scale_rule == AB_MXFP4_SCALES_CEIL, data<uint8_t>(args->codes),
                          data<uint8_t>(args->scales), device, cuda::stream_of(exec));
}

ab_status ab_cuda_unpack_workspace(const ab_unpack_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_cuda_unpack(const ab_unpack_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  if (s.M * s.N * s.C == 0) return ok();
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device("unpack", &device));
  return cuda::unpack(
      {data<const uint8_t>(args->packed), args->scales->data, args->packed->dtype, args->scales->dtype, s.N, s.C},
      {0, s.M}, nullptr, args->w->data, args->w->dtype, device, cuda::stream_of(exec));
}

}  // extern "C"
