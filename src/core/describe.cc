// Version and description of this build.
#include <cstdio>

#include "anabranch/types.h"
#include "core/isa.h"
#include "core/threads.h"

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
  const char* threading = "std::thread";
#endif
  std::snprintf(text, size, "version=%s\nisa=%s\nthreads=%d\nthreading=%s\nonednn=%s\ncompiler=%s\n", ab_version(),
                anabranch::isa_name(anabranch::isa()), anabranch::default_threads(), threading, onednn, __VERSION__);
}

}  // extern "C"
