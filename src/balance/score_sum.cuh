// Column sums of dense scores on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "balance/statistics.cuh"
#include "balance/token_tiles.h"
#include "core/status.h"

namespace anabranch::cuda {

struct ColumnSums {
  const void* scores = nullptr;  // [T, E]
  int32_t dtype = 0;
  int64_t E = 0;
  TokenTiles tiles;
  Partials partials;
  float* sum = nullptr;  // [sequences, E]
  int warps = 8;

  size_t shared_bytes() const { return static_cast<size_t>(warps * E) * sizeof(float); }
};

// Completes `call`, whose scores, dtype, E and sum are set, for a launch. *bytes is the size of its workspace.
ab_status prepare_column_sums(int64_t T, int64_t sequences, void* workspace, ColumnSums* call, size_t* bytes);

ab_status launch_column_sums(const ColumnSums& call, cudaStream_t stream);

}  // namespace anabranch::cuda
