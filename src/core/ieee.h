// IEEE arithmetic (denormals kept, round to nearest), whatever the calling framework has set for its own threads: XLA
// flushes denormals on the thread that calls us. The rule: arithmetic is IEEE everywhere in the library. Two places
// keep it: every function of the C interface opens a scope for its caller's thread (entry.h), and parallel_for one for
// each thread that it starts (threads.h). Native bfloat16 instructions ignore these settings and always flush
// denormals.
#pragma once

#include <cfenv>

namespace anabranch {

class ScopedIeeeArithmetic {
 public:
  ScopedIeeeArithmetic() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedIeeeArithmetic() { std::fesetenv(&saved_); }
  ScopedIeeeArithmetic(const ScopedIeeeArithmetic&) = delete;
  ScopedIeeeArithmetic& operator=(const ScopedIeeeArithmetic&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace anabranch
