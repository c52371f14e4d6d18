// ab_pack_mxfp4 and ab_unpack.
#include "experts/cpu/packed.h"

#include <algorithm>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "experts/cpu/product.h"
#include "experts/cpu/quantized_operands.h"
#include "experts/packed_check.h"

namespace anabranch {
namespace {

// Waking threads costs as much as packing a few hundred thousand elements.
int threads_for_elements(const ab_exec* exec, const PackedSizes& s) {
  return static_cast<double>(s.M) * static_cast<double>(s.N) * static_cast<double>(s.C) < 3e5 ? 1 : num_threads(exec);
}

struct Unpack {
  PackedSizes s;
  Workspace workspace;
  WeightOperand packed;

  Unpack(const ab_unpack_args& args, const PackedSizes& sizes, const ab_exec* memory)
      : s(sizes), workspace(memory), packed(workspace, args.packed, args.scales, args.w->dtype, true) {}

  void run(const ab_unpack_args& args, int threads) const {
    constexpr int64_t kTaskRows = 64;
    const PackedKernels& kernels = AB_SELECT_ISA(kPacked);
    const int64_t tasks = (s.N + kTaskRows - 1) / kTaskRows;
    packed.fill(threads);
    parallel_for(threads, s.M * tasks, [&](int64_t task, int) {
      const int64_t begin = task % tasks * kTaskRows;
      const int64_t rows = std::min(kTaskRows, s.N - begin);
      const Matrix from = packed.matrices().expert_matrix(task / tasks, s.N, s.C);
      const Matrix to = matrix_of(args.w, (task / tasks * s.N + begin) * s.C, s.C);
      kernels.unpack(at(from, begin, 0), rows, rows, s.C, to.dtype, to.data, s.C);
    });
  }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_pack_mxfp4_workspace(const ab_pack_mxfp4_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(0, bytes);
}

ab_status ab_pack_mxfp4(const ab_pack_mxfp4_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  constexpr int64_t kTaskBlocks = 256;
  const PackedKernels& kernels = AB_SELECT_ISA(kPacked);
  const int64_t blocks = s.M * (s.C / kMxBlock);
  parallel_for(threads_for_elements(exec, s), (blocks + kTaskBlocks - 1) / kTaskBlocks, [&](int64_t task, int) {
    const int64_t begin = task * kTaskBlocks;
    kernels.pack(args->w->dtype, matrix_of(args->w, begin * kMxBlock, 0).data, std::min(kTaskBlocks, blocks - begin),
                 args->scale_rule == AB_MXFP4_SCALES_CEIL, data<uint8_t>(args->codes) + begin * kMxBlock / 2,
                 data<uint8_t>(args->scales) + begin);
  });
  return ok();
}

ab_status ab_unpack_workspace(const ab_unpack_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(Unpack(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_unpack(const ab_unpack_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  PackedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  const Unpack op(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.run(*args, threads_for_elements(exec, s));
  return ok();
}

}  // extern "C"
