// The adapters in the backward pass of the feed-forward network on CUDA; see experts.h for the formulas.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "experts/cuda/lora.h"
#include "experts/lora_check.h"

namespace anabranch::cuda {

class LoraBackward {
 public:
  LoraBackward(Workspace& workspace, const ab_expert_ffn_backward_args& args, const FfnSizes& s);

  // The rows that the adapters read.
  struct Rows {
    RowMap map;
    Floats d_out;  // gathered
    Floats weighted_a;
    Floats dh;
    void* scratch = nullptr;  // scratch_bytes()
  };

  // Enqueue the steps in this order: the copies of the factors; v_out, then the gradient of the intermediate rows; v_in
  // and the gradients of the factors.
  ab_status fill(const Device& device, cudaStream_t stream) const;
  ab_status compute_v_out(const Rows& rows, const Device& device, cudaStream_t stream) const;
  ab_status compute_v_in_and_gradients(const Rows& rows, const Device& device, cudaStream_t stream) const;

  size_t scratch_bytes() const;

  // The low-rank terms of da' and dx.
  LowRank out() const { return out_.get(); }
  LowRank in() const { return in_.get(); }

 private:
  // What the GEMMs with one factor have in common.
  RowsProduct thin(const Rows& rows) const;
  bool is_shared(const ab_tensor& gradient) const { return gradient.shape[0] != s_.E; }
  RowsProduct u(const Rows& rows) const;
  RowsProduct v_in(const Rows& rows) const;
  RowsProduct z(const Rows& rows) const;
  WeightGradient d_b_in(const Rows& rows) const;
  // From [r, F, P] to [r, P, F].
  ab_status reorder_d_b_in(const Device& device, cudaStream_t stream) const;
  // Whether v_in and dB_in, or z and dA_out, are computed together.
  bool pairs_in() const;
  bool pairs_out() const;
  // The gradient x^T d_y of a factor [D, N].
  WeightGradient gradient(const Rows& rows, Floats x, int64_t D, Floats d_y, int64_t N,
                          const ab_tensor& d_factor) const;

  const ab_expert_ffn_backward_args& args_;
  FfnSizes s_;
  Factor a_in_;
  Factor b_in_;  // its columns are in the order of dh
  Factor a_out_;
  Factor b_out_;
  void* u_;  // [R, rank]
  void* z_;
  void* v_in_;
  void* v_out_;
  LowRankTerm in_;
  LowRankTerm out_;
  void* d_b_in_;  // float32 [E or 1, r, F, P] if gate and up alternate in dh
  void* parts_;   // of v_in or z, if they are computed in parts
};

// Whether an adapter reads dh.
bool needs_dh_for_lora(const ab_expert_ffn_backward_args& args, const FfnSizes& s);

}  // namespace anabranch::cuda
