// The version and the description of this build.
#include <cstdio>

#include "anabranch/types.h"
#include "core/isa.h"
#include "core/threads.h"
#include "experts/cpu/gemm.h"

#ifdef ANABRANCH_ONEDNN
#include <dnnl.h>
#endif

extern "C" {

const char* ab_version(void) { return ANABRANCH_VERSION; }

void ab_describe(char* text, size_t size) {
  char onednn[64] = "none";
#ifdef ANABRANCH_ONEDNN
  const dnnl_version_t* version = dnnl_version();
  std::snprintf(onednn, sizeof(onednn), "%d.%d.%d", version->major, version->minor, version->patch);
#endif
#ifdef ANABRANCH_OPENMP
  const char* threading = "openmp";
#else
  const char* threading = "private pool";
#endif
  char isa[256];
  const ab_status unknown = anabranch::check_isa();
  std::snprintf(isa, sizeof(isa), unknown.code == AB_OK ? "%s" : "refused, %.200s",
                unknown.code == AB_OK ? anabranch::isa_name(anabranch::isa()) : unknown.message);
  char bf16[256] = "native";
  const ab_status refusal = anabranch::check_bf16_products();
  if (refusal.code != AB_OK) {
    std::snprintf(bf16, sizeof(bf16), "refused, %.200s", refusal.message);
  } else if (anabranch::bf16_products() == anabranch::Bf16Products::converted) {
    std::snprintf(bf16, sizeof(bf16), "converted");
  }
  std::snprintf(text, size, "version=%s\nisa=%s\nbf16=%s\nthreads=%d\nthreading=%s\nonednn=%s\ncompiler=%s\n",
                ab_version(), isa, bf16, anabranch::default_threads(), threading, onednn, __VERSION__);
}

}  // extern "C"
