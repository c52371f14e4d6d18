// Packed weights (MXFP4 and FP8 blocks) on CUDA. Some GEMMs read them as they are (packed_path.h); for other GEMMs
// ranges of experts are unpacked into scratch memory.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/device.h"
#include "core/workspace.h"
#include "experts/cuda/ops/expert_range.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/packed_check.h"

namespace anabranch::cuda {

// Enqueues to[i] = the values of matrix range.first + i, rounded to `dtype`. group_sizes [E], on the device: matrices
// of experts without rows are not written; nullptr: all are.
ab_status unpack(const PackedMatrices& from, const ExpertRange& range, const int32_t* group_sizes, void* to,
                 int32_t dtype, const Device& device, cudaStream_t stream);

// Enqueues the packing of `blocks` blocks of 32 elements. ceil: the rule of the scale.
ab_status pack_mxfp4(const void* w, int32_t dtype, int64_t blocks, bool ceil, uint8_t* codes, uint8_t* scales,
                     const Device& device, cudaStream_t stream);

// Weights [E, N, C] of a GEMM that may be packed.
class MaybePacked {
 public:
  // scales: NULL if the weights are not packed. dtype: of the GEMM. reads_packed: whether the GEMM reads packed weights
  // as they are on every device, so that there is no scratch memory.
  MaybePacked(const ab_tensor* w, const ab_tensor* scales, int64_t E, int64_t N, int64_t C, int32_t dtype,
              bool reads_packed = false)
      : is_packed_(scales != nullptr),
        reads_packed_(is_packed_ && reads_packed),
        data_(data<const void>(w)),
        E_(E),
        dtype_(dtype) {
    if (!is_packed_) return;
    matrices_ = {data<const uint8_t>(w), scales->data, w->dtype, scales->dtype, N, C};
  }

  bool is_packed() const { return is_packed_; }
  const PackedMatrices& matrices() const { return matrices_; }

  // Bytes of the scratch memory.
  size_t scratch_bytes() const {
    return is_packed_ && !reads_packed_ ? unpacked_bytes(E_, matrices_.N, matrices_.C, dtype_) : 0;
  }

  // An address with the alignment of the weights, before the first range is decoded.
  void* where(void* scratch) const { return is_packed_ ? scratch : const_cast<void*>(data_); }

  // Calls run(range, weights) for ranges that cover all experts. `weights` are matrices [E, N, C] of which those of the
  // range may be read. group_sizes: [E], on the device.
  template <class Run>
  ab_status for_ranges(void* scratch, const int32_t* group_sizes, const Device& device, cudaStream_t stream,
                       Run&& run) const {
    if (!is_packed_ || E_ == 0) return run(ExpertRange{}, where(scratch));
    const int64_t step = experts_at_once(E_, matrices_.N, matrices_.C, dtype_);
    for (int64_t first = 0; first < E_; first += step) {
      const ExpertRange range{first, std::min(first + step, E_)};
      AB_RETURN_IF_ERROR(unpack(matrices_, range, group_sizes, scratch, dtype_, device, stream));
      // The address of the matrix of expert 0, which may not exist. GEMMs access those of the range.
      const int64_t bytes = first * matrices_.N * matrices_.C * dtype_size(dtype_);
      AB_RETURN_IF_ERROR(run(range, static_cast<char*>(scratch) - bytes));
    }
    return ok();
  }

 private:
  bool is_packed_;
  bool reads_packed_;
  const void* data_;
  int64_t E_;
  int32_t dtype_;
  PackedMatrices matrices_;
};

}  // namespace anabranch::cuda
