// ab_router_backward: processes blocks of tokens in parallel; each row of d_logits is written once.
#include "router/backward.h"

#include "core/entry.h"
#include "core/tensor.h"
#include "core/threads.h"
#include "router/check.h"
#include "router/cpu/threads.h"

namespace anabranch {
namespace {

size_t scratch_size(const RouterBackward& op) {
  return (AB_SELECT_ISA(kRouterBackward).scratch_size(op) + 63) / 64 * 64;
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_router_backward_workspace(const ab_router_backward_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  RouterBackward op;
  AB_RETURN_IF_ERROR(check_router_backward(args, &op));
  return report_workspace(scratch_size(op) * static_cast<size_t>(router_threads(exec, op.T, op.E)), bytes);
}

ab_status ab_router_backward(const ab_router_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  RouterBackward op;
  AB_RETURN_IF_ERROR(check_router_backward(args, &op));
  const int threads = router_threads(exec, op.T, op.E);
  const size_t scratch = scratch_size(op);
  AB_RETURN_IF_ERROR(check_workspace(exec, scratch * static_cast<size_t>(threads)));

  char* memory = static_cast<char*>(exec->workspace);
  const RouterBackwardKernels& kernels = AB_SELECT_ISA(kRouterBackward);
  parallel_for(threads, op.blocks.count(), [&](int64_t block, int thread) {
    kernels.run(op, block / op.blocks.blocks_per_sequence, op.blocks.begin(block), op.blocks.end(block),
                memory + static_cast<size_t>(thread) * scratch);
  });
  return ok();
}

}  // extern "C"
