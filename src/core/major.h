// The dimension of a GEMM operand that is contiguous in memory.
#pragma once

namespace anabranch::cuda {

// k: the contraction; mn: the rows or columns of the result.
enum class Major { k, mn };

}  // namespace anabranch::cuda
