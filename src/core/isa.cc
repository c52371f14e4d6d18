#include "core/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

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

Isa chosen_isa() {
  const Isa best = best_isa();
  const char* wanted = std::getenv("ANABRANCH_ISA");
  if (wanted == nullptr) return best;
  for (const Isa candidate : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (std::strcmp(wanted, isa_name(candidate)) == 0 && candidate < best) return candidate;
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa chosen = chosen_isa();
  return chosen;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: break;
  }
  return "baseline";
}

}  // namespace anabranch
