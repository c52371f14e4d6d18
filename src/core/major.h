// Which dimension of a GEMM operand is contiguous in memory.
#pragma once

namespace anabranch::cuda {

// k: the one that is summed; mn: that of the result's rows or columns.
enum class Major { k, mn };

}  // namespace anabranch::cuda
