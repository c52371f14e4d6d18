// The NVTX ranges of the library, as a profiler receives them: this program is the profiler. A call that is refused has
// its range too, so most of the test needs no GPU.
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

#include "anabranch/cuda.h"
#include "anabranch/exchange.h"
#include "device.h"

namespace anabranch::testing {
namespace {

std::vector<std::string> domains, ranges;
int open = 0;

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domains);
}

nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<char*>(text));
}

int NVTX_API push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  ranges.emplace_back(reinterpret_cast<const char*>(attributes->message.registered));
  return open++;
}

int NVTX_API pop(nvtxDomainHandle_t) { return --open; }

int NVTX_API start_profiler(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions;
  unsigned count = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
  *functions[NVTX_CBID_CORE2_DomainRegisterStringA] = reinterpret_cast<NvtxFunctionPointer>(register_string);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

// Calls a function with arguments that it refuses.
template <class Args>
void refuse(ab_status (*function)(const Args*, const ab_exec*), int32_t backward = 0) {
  Args args{};
  args.size = sizeof(args);
  if constexpr (requires { args.backward; }) args.backward = backward;
  ab_exec exec{};
  exec.size = sizeof(exec);
  EXPECT_NE(function(&args, &exec).code, AB_OK);
}

TEST(Ranges, EveryOperationHasItsPhase) {
  InitializeInjectionNvtx2_fnptr = start_profiler;  // read at the first range
  refuse(ab_cuda_router_forward);
  refuse(ab_cuda_plan);
  refuse(ab_cuda_dispatch);
  refuse(ab_cuda_grouped_matmul_combine);
  refuse(ab_cuda_combine);
  refuse(ab_cuda_combine_backward);
  refuse(ab_cuda_router_backward);
  refuse(ab_cuda_grouped_matmul_combine, 1);
  refuse(ab_cuda_exchange_all_gather);
  refuse(ab_cuda_exchange_sum);
  refuse(ab_cuda_quantize_rows);
  refuse(ab_cuda_grouped_matmul_dw);
  refuse(ab_cuda_moe_aux_loss);
  const std::vector<std::string> expected = {
      "route", "plan",     "dispatch", "down",     "combine",        "combine_backward", "route_backward",
      "d_x",   "exchange", "exchange", "quantize", "grouped_matmul", "aux_loss"};
  EXPECT_EQ(ranges, expected);
  EXPECT_EQ(open, 0) << "a range was not closed";
  EXPECT_EQ(domains, std::vector<std::string>{"anabranch"});
}

}  // namespace
}  // namespace anabranch::testing
