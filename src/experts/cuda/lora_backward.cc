#include "experts/cuda/lora_backward.h"

#include <algorithm>

#include "core/tensor.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/strided_copy.h"

namespace anabranch::cuda {
namespace {

using Args = ab_expert_ffn_backward_args;

bool needs_v_in(const Args& args, const FfnSizes& s) {
  return s.rank_in > 0 && (args.dx_rows != nullptr || args.d_lora_a_in != nullptr || args.lora_v_in != nullptr);
}
bool needs_v_out(const Args& args, const FfnSizes& s) {
  return s.rank_out > 0 && (args.h != nullptr || args.d_lora_a_out != nullptr);
}
// A call without h reads v_in and v_out if they are given.
bool computes_v_in(const Args& args, const FfnSizes& s) {
  return needs_v_in(args, s) && (args.h != nullptr || args.lora_v_in == nullptr);
}
bool computes_v_out(const Args& args, const FfnSizes& s) {
  return needs_v_out(args, s) && (args.h != nullptr || args.lora_v_out == nullptr);
}
bool computes_u(const Args& args) { return args.d_lora_b_in != nullptr && args.lora_u == nullptr; }
bool computes_z(const Args& args) { return args.d_lora_b_out != nullptr; }

const ab_tensor* if_needed(bool needed, const ab_tensor* factor) { return needed ? factor : nullptr; }

}  // namespace

bool needs_dh_for_lora(const Args& args, const FfnSizes& s) {
  return args.d_lora_b_in != nullptr || computes_v_in(args, s);
}

LoraBackward::LoraBackward(Workspace& workspace, const Args& args, const FfnSizes& s)
    : args_(args),
      s_(s),
      a_in_(workspace, if_needed(args.dx_rows != nullptr || computes_u(args), args.lora_a_in), s.dtype, s.E,
            args.dx_rows != nullptr ? order_like(s.layout.in_transposed && !is_fp8(args)) : FactorOrder::free_columns),
      b_in_(workspace, if_needed(computes_v_in(args, s), args.lora_b_in), s.dtype, s.E, FactorOrder::free_rows,
            s.layout.interleaved),
      a_out_(workspace, if_needed(args.h != nullptr || computes_z(args), args.lora_a_out), s.dtype, s.E,
             args.h != nullptr ? order_like(s.layout.out_transposed && !is_fp8(args)) : FactorOrder::free_columns),
      b_out_(workspace, if_needed(computes_v_out(args, s), args.lora_b_out), s.dtype, s.E, FactorOrder::free_rows),
      u_(take_low_rank_rows(workspace, args.lora_u, computes_u(args), s.R, s.rank_in, s.dtype)),
      z_(take_low_rank_rows(workspace, nullptr, computes_z(args), s.R, s.rank_out, s.dtype)),
      v_in_(take_low_rank_rows(workspace, args.lora_v_in, needs_v_in(args, s), s.R, s.rank_in, s.dtype)),
      v_out_(take_low_rank_rows(workspace, args.lora_v_out, needs_v_out(args, s), s.R, s.rank_out, s.dtype)),
      in_(workspace, v_in_, a_in_, {s.R, s.E}, s.D, args.dx_rows == nullptr ? 0 : s.rank_in, s.dtype, is_fp8(args)),
      out_(workspace, v_out_, a_out_, {s.R, s.E}, s.F, args.h == nullptr ? 0 : s.rank_out, s.dtype, is_fp8(args)),
      d_b_in_(args.d_lora_b_in == nullptr || !s.layout.interleaved
                  ? nullptr
                  : workspace.take_rows(args.d_lora_b_in->shape[0] * s.rank_in, s.P * s.F, AB_FLOAT32)),
      parts_(workspace.take_bytes(std::max(pairs_in() ? pair_bytes(s.R, s.P * s.F, s.rank_in) : 0,
                                           pairs_out() ? pair_bytes(s.R, s.F, s.rank_out) : 0))) {}

ab_status LoraBackward::fill(const Device& device, cudaStream_t stream) const {
  return cuda::fill({&a_in_, &b_in_, &a_out_, &b_out_}, data<const int32_t>(args_.group_sizes), device, stream);
}

RowsProduct LoraBackward::thin(const Rows& rows) const {
  return {.group_sizes = data<const int32_t>(args_.group_sizes),
          .map = rows.map,
          .dtype = s_.dtype,
          .precision = precision_of(args_),
          .R = s_.R,
          .E = s_.E};
}

// v_out = scale_out d_y B_out^T
ab_status LoraBackward::compute_v_out(const Rows& rows, const Device& device, cudaStream_t stream) const {
  if (!computes_v_out(args_, s_)) return out_.fill(device, stream);
  const LowRankRows v_out{.x = rows.d_out.data,
                          .gathers_x = true,
                          .D = s_.D,
                          .transposed = true,
                          .scale = args_.lora_scale_out,
                          .u = v_out_,
                          .rank = s_.rank_out};
  AB_RETURN_IF_ERROR(compute_rows_product(product_of(v_out, b_out_, thin(rows)), device, stream));
  return out_.fill(device, stream);
}

// v_in = scale_in dh B_in^T
RowsProduct LoraBackward::v_in(const Rows& rows) const {
  const LowRankRows v_in{.x = rows.dh.data,
                         .D = s_.P * s_.F,
                         .transposed = true,
                         .scale = args_.lora_scale_in,
                         .u = v_in_,
                         .rank = s_.rank_in};
  return product_of(v_in, b_in_, thin(rows));
}

RowsProduct LoraBackward::u(const Rows& rows) const {
  const LowRankRows u{
      .x = args_.x->data, .gathers_x = true, .D = s_.D, .scale = args_.lora_scale_in, .u = u_, .rank = s_.rank_in};
  return product_of(u, a_in_, thin(rows));
}

// z = scale_out (w a) A_out
RowsProduct LoraBackward::z(const Rows& rows) const {
  const LowRankRows z{
      .x = rows.weighted_a.data, .D = s_.F, .scale = args_.lora_scale_out, .u = z_, .rank = s_.rank_out};
  return product_of(z, a_out_, thin(rows));
}

bool LoraBackward::pairs_in() const {
  return args_.d_lora_b_in != nullptr && computes_v_in(args_, s_) && !is_shared(*args_.d_lora_b_in) &&
         may_pair(s_.R, s_.E, s_.P * s_.F, s_.rank_in, s_.dtype);
}
bool LoraBackward::pairs_out() const {
  return args_.d_lora_a_out != nullptr && computes_z(args_) && !is_shared(*args_.d_lora_a_out) &&
         may_pair(s_.R, s_.E, s_.F, s_.rank_out, s_.dtype);
}

size_t LoraBackward::scratch_bytes() const {
  const auto bytes = [&](const ab_tensor* d_factor, int64_t D, int64_t N) {
    return d_factor == nullptr ? size_t{0} : weight_gradient_bytes(s_.R, s_.E, D, N, is_shared(*d_factor));
  };
  return std::max({bytes(args_.d_lora_a_in, s_.D, s_.rank_in), bytes(args_.d_lora_b_in, s_.rank_in, s_.P * s_.F),
                   bytes(args_.d_lora_a_out, s_.F, s_.rank_out), bytes(args_.d_lora_b_out, s_.rank_out, s_.D)});
}

WeightGradient LoraBackward::gradient(const Rows& rows, Floats x, int64_t D, Floats d_y, int64_t N,
                                      const ab_tensor& d_factor) const {
  WeightGradient gradient;
  gradient.map = rows.map;
  gradient.x = x;
  gradient.d_y = d_y;
  gradient.group_sizes = data<const int32_t>(args_.group_sizes);
  gradient.d_w = Floats(&d_factor);
  gradient.precision = precision_of(args_);
  gradient.accumulates = args_.accumulate != 0;
  gradient.shared = is_shared(d_factor);
  gradient.R = s_.R;
  gradient.E = s_.E;
  gradient.D = D;
  gradient.N = N;
  return gradient;
}

namespace {

// Enqueues gradients one after another. They share a list of segments where their bounds agree.
class Gradients {
 public:
  Gradients(void* scratch, const Device& device, cudaStream_t stream)
      : scratch_(scratch), device_(device), stream_(stream) {}

  ab_status compute(WeightGradient gradient) {
    if (is_empty(gradient)) return ok();
    find_segments(&gradient);
    return compute_weight_gradient(gradient, scratch_, device_, stream_);
  }
  ab_status compute(FactorPair pair) {
    if (is_empty(pair.gradient)) return compute_rows_product(pair.rows, device_, stream_);
    find_segments(&pair.gradient);
    return compute_factor_pair(pair, scratch_, device_, stream_);
  }

 private:
  static bool is_empty(const WeightGradient& gradient) {
    return (gradient.shared ? 1 : gradient.E) * gradient.D * gradient.N == 0;
  }

  // Sets the use of the list of segments.
  void find_segments(WeightGradient* gradient) {
    const SegmentBounds bounds = bound_segments(gradient->R, gradient->E, gradient->D, gradient->N);
    const bool same = !gradient->shared && next_use_ > 0 && bounds.rows == rows_ && next_use_ < kSegmentUses;
    gradient->segment_use = same ? next_use_ : 0;
    next_use_ = gradient->shared ? 0 : gradient->segment_use + 1;
    rows_ = bounds.rows;
  }

  void* scratch_;
  const Device& device_;
  cudaStream_t stream_;
  int next_use_ = 0;
  int64_t rows_ = 0;
};

}  // namespace

// dB_in = u^T dh
WeightGradient LoraBackward::d_b_in(const Rows& rows) const {
  const Floats u(u_, s_.dtype);
  WeightGradient gradient = this->gradient(rows, u, s_.rank_in, rows.dh, s_.P * s_.F, *args_.d_lora_b_in);
  if (d_b_in_ == nullptr) return gradient;
  gradient.d_w = Floats(d_b_in_, AB_FLOAT32);
  gradient.accumulates = false;
  return gradient;
}

ab_status LoraBackward::reorder_d_b_in(const Device& device, cudaStream_t stream) const {
  const int64_t matrices = args_.d_lora_b_in->shape[0];
  const StridedCopy ordered{.from = {d_b_in_, AB_FLOAT32},
                            .to = Floats(args_.d_lora_b_in),
                            .shape = {matrices, s_.rank_in, s_.P, s_.F},
                            .from_strides = {s_.rank_in * s_.P * s_.F, s_.P * s_.F, 1, s_.P},
                            .to_strides = {s_.rank_in * s_.P * s_.F, s_.P * s_.F, s_.F, 1},
                            .adds = args_.accumulate != 0};
  return copy({&ordered, 1}, device.multiprocessors, stream);
}

ab_status LoraBackward::compute_v_in_and_gradients(const Rows& rows, const Device& device, cudaStream_t stream) const {
  Gradients gradients(rows.scratch, device, stream);
  const auto low_rank = [&](void* low_rank_rows) { return Floats(low_rank_rows, s_.dtype); };
  auto* const parts = static_cast<float*>(parts_);
  if (computes_u(args_)) AB_RETURN_IF_ERROR(compute_rows_product(u(rows), device, stream));
  if (pairs_in()) {
    AB_RETURN_IF_ERROR(gradients.compute(FactorPair{v_in(rows), d_b_in(rows), parts}));
  } else {
    if (computes_v_in(args_, s_)) AB_RETURN_IF_ERROR(compute_rows_product(v_in(rows), device, stream));
    if (args_.d_lora_b_in != nullptr) AB_RETURN_IF_ERROR(gradients.compute(d_b_in(rows)));
  }
  if (d_b_in_ != nullptr) AB_RETURN_IF_ERROR(reorder_d_b_in(device, stream));
  AB_RETURN_IF_ERROR(in_.fill(device, stream));
  if (args_.d_lora_a_in != nullptr) {  // x^T v_in
    WeightGradient d_a_in = gradient(rows, Floats(args_.x), s_.D, low_rank(v_in_), s_.rank_in, *args_.d_lora_a_in);
    d_a_in.gathers_x = true;
    AB_RETURN_IF_ERROR(gradients.compute(d_a_in));
  }
  // dA_out = (w a)^T v_out
  const auto d_a_out = [&] {
    return gradient(rows, rows.weighted_a, s_.F, low_rank(v_out_), s_.rank_out, *args_.d_lora_a_out);
  };
  if (pairs_out()) {
    AB_RETURN_IF_ERROR(gradients.compute(FactorPair{z(rows), d_a_out(), parts}));
  } else {
    if (args_.d_lora_a_out != nullptr) AB_RETURN_IF_ERROR(gradients.compute(d_a_out()));
    if (computes_z(args_)) AB_RETURN_IF_ERROR(compute_rows_product(z(rows), device, stream));
  }
  if (args_.d_lora_b_out == nullptr) return ok();
  // z^T d_y
  WeightGradient d_b_out = gradient(rows, low_rank(z_), s_.rank_out, rows.d_out, s_.D, *args_.d_lora_b_out);
  d_b_out.gathers_d_y = true;
  return gradients.compute(d_b_out);
}

}  // namespace anabranch::cuda
