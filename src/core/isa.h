// Run-time selection of the instruction set.
//
// A file NAME.isa.cc is compiled once per instruction set, with AB_ISA set to its name: baseline (what the target
// always has), avx2 (with FMA and F16C), avx512 (F, BW, DQ, VL). Everything in it is in namespace anabranch::AB_ISA or
// has internal linkage: the linker could merge an inline function with external linkage into the baseline, where it
// would fault (a test reads the symbol tables). The file exports one table of functions, selected at run time by
//
//     const Kernels& kernels = AB_SELECT_ISA(kKernels);
#pragma once

#include "anabranch/types.h"

namespace anabranch {

enum class Isa { baseline = 0, avx2 = 1, avx512 = 2 };

// The best instruction set that this machine supports, limited by the environment variable ANABRANCH_ISA (baseline,
// avx2, avx512), which is read once.
Isa isa();

// Returns an error if ANABRANCH_ISA has an unknown value.
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
