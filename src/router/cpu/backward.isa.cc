#include "router/backward.h"

#include "router/cpu/scratch.h"
#include "router/cpu/slots.h"

namespace anabranch::AB_ISA {
namespace {

// Processes kLanes tokens together: computes the gradients of their weights with one token per lane, then their rows
// one by one.
class Tile {
 public:
  Tile(const RouterBackward& op, int64_t sequence, void* memory)
      : op_(op), is_softmax_(op.score_function == AB_SOFTMAX) {
    Scratch scratch(memory);
    const int64_t row = row_blocks(op.E) * kRowPad;
    z_ = scratch.take<float>(row);
    e_ = scratch.take<float>(op_.softmax_rows ? kLanes * row : 0);
    s_ = scratch.take<float>(row);
    g_ = scratch.take<float>(row);
    d_ = scratch.take<float>(row);
    const int64_t slots = static_cast<int64_t>(op.K) * kLanes;
    experts_ = scratch.take<int32_t>(slots);
    slot_z_ = scratch.take<float>(slots);
    slot_p_ = scratch.take<float>(slots);
    slot_g_ = scratch.take<float>(slots);
    size_ = scratch.used();
    if (memory != nullptr && op.d_score_sum.data != nullptr) {
      load_row(op.d_score_sum.data, op.d_score_sum.dtype, sequence, op.E, 0.0f, g_);
    }
  }

  size_t size() const { return size_; }

  // Processes tokens first <= t < first + n, n <= kLanes.
  void run(int64_t first, int n) {
    for (int lane = 0; lane < kLanes; ++lane) {
      unmasked_[lane] = lane < n && (op_.token_mask == nullptr || op_.token_mask[first + lane] != 0);
      if (unmasked_[lane]) read_row(first + lane, lane);
    }
    if (op_.weighted) weights_backward(first);
    for (int lane = 0; lane < n; ++lane) write_row(first + lane, lane);
  }

 private:
  int64_t blocks() const { return row_blocks(op_.E); }
  float* exp_row(int lane) { return e_ + lane * blocks() * kRowPad; }

  // Computes the softmax of a token if it is needed. lse serves as the shift; dividing by the sum cancels the rounding
  // of lse.
  void read_row(int64_t t, int lane) {
    const bool known = op_.lse != nullptr;
    if (op_.softmax_rows) {
      const float* z = logits_row(op_.logits, op_.logits_dtype, t, op_.E, z_);
      const float shift = known ? op_.lse[t] : row_max(z, blocks());
      const float sum = softmax_row(z, blocks(), shift, exp_row(lane));
      softmax_.shift[lane] = shift;
      softmax_.factor[lane] = 1.0f / sum;
      softmax_.nan_or_zero[lane] = sum - sum;  // NaN if sum is NaN or infinite
    } else if (is_softmax_ && op_.weighted && known) {
      softmax_.nan_or_zero[lane] = op_.lse[t] - op_.lse[t];
    } else if (is_softmax_ && op_.weighted) {
      const float* z = logits_row(op_.logits, op_.logits_dtype, t, op_.E, z_);
      softmax_.nan_or_zero[lane] = row_has_nan_or_inf(z, blocks()) ? __builtin_nanf("") : 0.0f;
    }
  }

  // experts_[k][lane] = the experts of token t, -1 for none.
  void read_selection(int64_t t, int lane) {
    if (!unmasked_[lane]) {
      for (int64_t k = 0; k < op_.K; ++k) experts_[k * kLanes + lane] = -1;
      return;
    }
    const void* const given = op_.selection.data;
    const auto* const bytes = static_cast<const uint8_t*>(given);
    switch (op_.selection.format) {
      case MapFormat::bytes: return read_map(lane, [row = bytes + t * op_.E](int64_t e) { return row[e] != 0; });
      case MapFormat::bits:
        return read_map(lane,
                        [row = bytes + t * ((op_.E + 7) / 8)](int64_t e) { return (row[e / 8] >> e % 8 & 1) != 0; });
      default: break;
    }
    switch (op_.selection.dtype) {
      case AB_INT16: return read_indices(static_cast<const int16_t*>(given), t, lane);
      case AB_INT64: return read_indices(static_cast<const int64_t*>(given), t, lane);
      default: return read_indices(static_cast<const int32_t*>(given), t, lane);
    }
  }
  template <class Index>
  void read_indices(const Index* indices, int64_t t, int lane) {
    for (int64_t k = 0; k < op_.K; ++k) {
      const Index e = indices[t * op_.K + k];
      experts_[k * kLanes + lane] = e >= 0 && e < op_.E ? static_cast<int32_t>(e) : -1;
    }
  }
  template <class IsSelected>
  void read_map(int lane, const IsSelected& is_selected) {
    int64_t k = 0;
    for (int64_t e = 0; e < op_.E && k < op_.K; ++e) {
      if (is_selected(e)) experts_[k++ * kLanes + lane] = static_cast<int32_t>(e);
    }
    for (; k < op_.K; ++k) experts_[k * kLanes + lane] = -1;
  }

  // slot_g_[k][lane] = the gradient of the selected logit; row_shift_[lane] = sum_R g s for raw softmax.
  void weights_backward(int64_t first) {
    const int64_t K = op_.K;
    for (int lane = 0; lane < kLanes; ++lane) read_selection(first + lane, lane);
    for (int64_t k = 0; k < K; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t t = first + lane;
        const int32_t e = experts_[k * kLanes + lane];
        float g = 0.0f;
        if (e >= 0 && op_.d_weights.data != nullptr)
          g = load_element(op_.d_weights.data, op_.d_weights.dtype, t * K + k);
        if (e >= 0 && op_.d_probs.data != nullptr) g = load_element(op_.d_probs.data, op_.d_probs.dtype, t * op_.E + e);
        slot_g_[k * kLanes + lane] = g * op_.scaling_factor;
      }
    }
    gather_logits(op_.logits, op_.logits_dtype, op_.E, K, first, experts_, slot_z_);
    __builtin_memcpy(slot_p_, slot_z_, static_cast<size_t>(K) * kLanes * sizeof(float));
    float total[kLanes] = {};
    score_slots(op_.score_function, op_.normalize, K, softmax_, slot_p_, total);

    const auto p = [this](int64_t k) { return load_lanes(slot_p_ + k * kLanes); };
    const auto g = [this](int64_t k) { return load_lanes(slot_g_ + k * kLanes); };
    if (is_softmax_) {
      // normalised: dz_k = p_k (g_k - sum_R g p).  raw: dz_e = s_e ([e in R] g_e - sum_R g s).
      const LaneFloats dot = sum_slots(K, [&](int64_t k) { return p(k) * g(k); });
      const LaneFloats inner = op_.normalize ? dot : LaneFloats{};
      for (int64_t k = 0; k < K; ++k) store_lanes(slot_g_ + k * kLanes, p(k) * (g(k) - inner));
      store_lanes(row_shift_, op_.normalize ? LaneFloats{} : dot);
      return;
    }
    if (op_.normalize) {
      // ds_k = (g_k - sum_R g_j s_j / S) / S
      const LaneFloats dot = sum_slots(K, [&](int64_t k) { return p(k) * g(k); });
      for (int64_t k = 0; k < K; ++k) store_lanes(slot_g_ + k * kLanes, (g(k) - dot) / load_lanes(total));
    }
    // dz_k = ds_k s'(z_k)
    score_gradient(slot_z_, K * kLanes, slot_p_);
    for (int64_t i = 0; i < K * kLanes; ++i) slot_g_[i] *= slot_p_[i];
  }

  // s' of the elementwise score functions.
  void score_gradient(const float* z, int64_t count, float* out) const {
    if (op_.score_function == AB_SIGMOID) {
      for (int64_t i = 0; i < count; ++i) out[i] = sigmoid_gradient(z[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = sqrtsoftplus_gradient(z[i]);
    }
  }

  void write_row(int64_t t, int lane) {
    const int64_t E = op_.E;
    const bool direct = op_.d_logits_dtype == AB_FLOAT32;
    float* d = direct ? static_cast<float*>(op_.d_logits) + t * E : d_;
    if (unmasked_[lane] && op_.d_aux_scores.data != nullptr) {
      load_row(op_.d_aux_scores.data, op_.d_aux_scores.dtype, t, E, 0.0f, g_);
    }
    if (unmasked_[lane] && op_.softmax_rows) {
      softmax_terms(t, lane, d);
    } else {
      for (int64_t e = 0; e < E; ++e) d[e] = 0.0f;
    }
    if (unmasked_[lane] && op_.auxiliary && !is_softmax_) auxiliary_terms(t, d);
    if (unmasked_[lane] && op_.weighted) {
      for (int64_t k = 0; k < op_.K; ++k) {
        const int32_t e = experts_[k * kLanes + lane];
        if (e >= 0) d[e] += slot_g_[k * kLanes + lane];
      }
    }
    if (!direct) store_row(d, E, op_.d_logits_dtype, t, op_.d_logits);
  }

  // d_e = s_e (G_e - sum G s + d_lse - sum_R g s), s = softmax(z): the common terms of auxiliary scores, lse and raw
  // weights.
  void softmax_terms(int64_t t, int lane, float* d) {
    const float* exponentials = exp_row(lane);
    const float factor = softmax_.factor[lane];
    const bool by_score = op_.auxiliary && is_softmax_;
    float shift = by_score ? -factor * row_dot(exponentials, g_, blocks()) : 0.0f;
    if (op_.d_lse.data != nullptr) shift += load_element(op_.d_lse.data, op_.d_lse.dtype, t);
    if (op_.weighted && is_softmax_ && !op_.normalize) shift -= row_shift_[lane];
    if (by_score) {
      for (int64_t e = 0; e < op_.E; ++e) d[e] = exponentials[e] * factor * (g_[e] + shift);
    } else {
      for (int64_t e = 0; e < op_.E; ++e) d[e] = exponentials[e] * factor * shift;
    }
  }

  // d_e += s'_e (G_e - sum G s / S) / S, S = sum of s over all experts.
  void auxiliary_terms(int64_t t, float* d) {
    const float* z = logits_row(op_.logits, op_.logits_dtype, t, op_.E, z_);
    score_row(op_.score_function, z, blocks() * kRowPad, s_);
    const float total = row_sum(s_, blocks()) + kSumEpsilon;
    for (int64_t e = 0; e < blocks() * kRowPad; ++e) s_[e] /= total;
    const float dot = row_dot(s_, g_, blocks());
    const float factor = 1.0f / total;
    score_gradient(z, blocks() * kRowPad, s_);
    for (int64_t e = 0; e < op_.E; ++e) d[e] += (g_[e] - dot) * factor * s_[e];
  }

  const RouterBackward& op_;
  const bool is_softmax_;
  size_t size_;

  float* z_;          // a row of logits
  float* e_;          // [kLanes] rows of exp(z - shift)
  float* s_;          // a row of scores or their derivatives
  float* g_;          // a row of cotangents of the auxiliary scores
  float* d_;          // a row of gradients
  int32_t* experts_;  // [K][kLanes], like the three below
  float* slot_z_;
  float* slot_p_;
  float* slot_g_;
  float row_shift_[kLanes] = {};
  LaneSoftmax softmax_;
  bool unmasked_[kLanes] = {};
};

void run(const RouterBackward& op, int64_t sequence, int64_t begin, int64_t end, void* scratch) {
  Tile tile(op, sequence, scratch);
  for (int64_t t = begin; t < end; t += kLanes) {
    tile.run(t, static_cast<int>(end - t < kLanes ? end - t : kLanes));
  }
}

size_t scratch_size(const RouterBackward& op) { return Tile(op, 0, nullptr).size(); }

}  // namespace

const RouterBackwardKernels kRouterBackward = {run, scratch_size};

}  // namespace anabranch::AB_ISA
