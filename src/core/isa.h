// Run-time choice of vector instructions.
//
// A file NAME.isa.cc is compiled once for each instruction set, with AB_ISA naming it: baseline (what the target always
// has), avx2 (with FMA and F16C), avx512 (F, BW, DQ, VL). Everything in it lives in namespace anabranch::AB_ISA or has
// internal linkage: an inline function with external linkage could be merged into the baseline by the linker and fault
// there (a test reads the symbol tables). It exports one table of functions, picked at run time by
//
//     const Kernels& kernels = AB_SELECT_ISA(kKernels);
#pragma once

#include "anabranch/types.h"

namespace anabranch {

enum class Isa { baseline = 0, avx2 = 1, avx512 = 2 };

// The best set that this machine has, up to the one that the environment variable ANABRANCH_ISA names (baseline, avx2,
// avx512); read once.
Isa isa();

// Refuses every other name there.
ab_status check_isa();

const char* isa_name(Isa isa);

#if defined(__x86_64__)
#define AB_DECLARE_ISA(type, table) \
  namespace baseline {              \
  extern const type table;          \
  }                                 \
  namespace avx2 {                  \
  extern const type table;          \
  }                                 \
  namespace avx512 {                \
  extern const type table;          \
  }
#define AB_SELECT_ISA(table)                                                   \
  (::anabranch::isa() == ::anabranch::Isa::avx512 ? ::anabranch::avx512::table \
   : ::anabranch::isa() == ::anabranch::Isa::avx2 ? ::anabranch::avx2::table   \
                                                  : ::anabranch::baseline::table)
#else
#define AB_DECLARE_ISA(type, table) \
  namespace baseline {              \
  extern const type table;          \
  }
#define AB_SELECT_ISA(table) (::anabranch::baseline::table)
#endif

}  // namespace anabranch
