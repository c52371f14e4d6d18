// The table of all operations.
#include "anabranch/balance.h"
#include "anabranch/cuda.h"
#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"
#include "calls.h"

namespace anabranch::fuzz {
namespace {

template <class Args, ab_status (*kRun)(const Args*, const ab_exec*)>
ab_status run_as(const void* args, const ab_exec* exec) {
  return kRun(static_cast<const Args*>(args), exec);
}
template <class Args, ab_status (*kQuery)(const Args*, const ab_exec*, size_t*)>
ab_status query_as(const void* args, const ab_exec* exec, size_t* bytes) {
  return kQuery(static_cast<const Args*>(args), exec, bytes);
}

#define RUN(name, function) run_as<ab_##name##_args, function>
#define QUERY(name, function) query_as<ab_##name##_args, function##_workspace>
#define OPERATION(name, run, ...) \
  Operation { #name, "ab_" #name "_args", make_##name, RUN(name, run), __VA_ARGS__ }

}  // namespace

#if defined(ANABRANCH_FUZZ_EMULATED)
// The CUDA function together with the CPU function, for tests/emulation.
#define BESIDE_CPU(name, query, other_query) OPERATION(name, ab_cuda_##name, query, RUN(name, ab_##name), other_query)
#define WITH_WORKSPACE(name) BESIDE_CPU(name, QUERY(name, ab_cuda_##name), QUERY(name, ab_##name))
#define WITH_WORKSPACE_ON_CPU(name) BESIDE_CPU(name, nullptr, QUERY(name, ab_##name))
#define WITHOUT_WORKSPACE(name) BESIDE_CPU(name, nullptr, nullptr)
#else
#define WITH_WORKSPACE(name) OPERATION(name, ab_##name, QUERY(name, ab_##name))
#define WITH_WORKSPACE_ON_CPU(name) WITH_WORKSPACE(name)
#define WITHOUT_WORKSPACE(name) OPERATION(name, ab_##name, nullptr)
#endif

const std::vector<Operation> kOperations = {
    WITH_WORKSPACE(router_forward),       WITH_WORKSPACE(router_backward),
    WITHOUT_WORKSPACE(load_balance_loss), WITH_WORKSPACE(score_sum),
    WITH_WORKSPACE(moe_aux_loss),         WITH_WORKSPACE_ON_CPU(combine),
    WITHOUT_WORKSPACE(combine_backward),  WITH_WORKSPACE(plan),
    WITHOUT_WORKSPACE(dispatch),          WITH_WORKSPACE(sort_chunks),
    WITHOUT_WORKSPACE(expand_row_id_map), WITH_WORKSPACE(quantize_rows),
    WITH_WORKSPACE(quantize_weights),     WITH_WORKSPACE(grouped_matmul),
    WITH_WORKSPACE(grouped_matmul_dw),    WITH_WORKSPACE(grouped_matmul_combine),
    WITH_WORKSPACE(expert_ffn_forward),   WITH_WORKSPACE(expert_ffn_backward),
};

}  // namespace anabranch::fuzz
