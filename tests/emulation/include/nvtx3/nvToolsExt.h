// The part of NVTX that src/core/range.h uses, without a profiler: emulated kernels need no CUDA toolkit.
#pragma once

#include <cstdint>

using nvtxDomainHandle_t = struct nvtxDomain*;
using nvtxStringHandle_t = struct nvtxString*;

struct nvtxEventAttributes_t {
  uint16_t version, size;
  int32_t messageType;
  struct {
    nvtxStringHandle_t registered;
  } message;
};

constexpr uint16_t NVTX_VERSION = 3;
constexpr uint16_t NVTX_EVENT_ATTRIB_STRUCT_SIZE = sizeof(nvtxEventAttributes_t);
constexpr int32_t NVTX_MESSAGE_TYPE_REGISTERED = 3;

inline nvtxDomainHandle_t nvtxDomainCreateA(const char*) { return nullptr; }
inline nvtxStringHandle_t nvtxDomainRegisterStringA(nvtxDomainHandle_t, const char*) { return nullptr; }
inline int nvtxDomainRangePushEx(nvtxDomainHandle_t, const nvtxEventAttributes_t*) { return 0; }
inline int nvtxDomainRangePop(nvtxDomainHandle_t) { return 0; }
