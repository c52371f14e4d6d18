// IEEE arithmetic (denormals are preserved, rounding is to nearest), whatever modes the calling framework has set: XLA
// flushes denormals on the thread that calls this library. Arithmetic is IEEE everywhere in the library. Two places
// ensure it: every function of the C interface opens a scope on its caller's thread (entry.h), and parallel_for on each
// thread that it uses (threads.h). Native bfloat16 instructions ignore these modes and always flush denormals.
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
