#include "core/isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "core/status.h"

namespace anabranch {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::baseline;
#else
  return Isa::baseline;
#endif
}

struct Choice {
  Isa isa;
  ab_status status;  // an error if the value of ANABRANCH_ISA is unknown
};

Choice choose_isa() {
  const Isa best = best_isa();
  const char* requested = std::getenv("ANABRANCH_ISA");
  if (requested == nullptr || requested[0] == '\0') return {best, ok()};
  for (const Isa candidate : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (std::strcmp(requested, isa_name(candidate)) == 0) return {std::min(candidate, best), ok()};
  }
  return {best, error(AB_UNSUPPORTED, "ANABRANCH_ISA: got %s, expected baseline, avx2, avx512 or nothing", requested)};
}

const Choice& choice() {
  static const Choice chosen = choose_isa();
  return chosen;
}

}  // namespace

Isa isa() { return choice().isa; }

ab_status check_isa() { return choice().status; }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: break;
  }
  return "baseline";
}

}  // namespace anabranch
