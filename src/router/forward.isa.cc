#include "router/forward.h"

#include "router/scratch.h"
#include "router/slots.h"

namespace anabranch::AB_ISA {
namespace {

// kLanes tokens go together: their rows are read one by one, then selection and weights are done a token a lane.
class Tile {
 public:
  Tile(const RouterForward& op, void* memory)
      : op_(op), groups_(op.num_groups > 0 ? op.num_groups : 1), group_size_(op.E / groups_) {
    Scratch scratch(memory);
    const bool grouped = op.num_groups > 0;
    const int64_t K = op.K;
    length_ = list_length(K);
    group_length_ = grouped ? list_length(K / op.group_topk) : 1;
    kept_length_ = grouped ? list_length(op.group_topk) : 1;
    group_vectors_ = round_up(ceil_div(group_size_, kLanes), group_length_);
    all_groups_ = grouped ? round_up(groups_, kept_length_) : 0;
    const int64_t vectors = grouped ? op.group_topk * group_vectors_ : group_vectors_;
    stream_length_ = stream_length(K, vectors);
    stream_vectors_ = round_up(vectors, stream_length_);
    may_be_short_ = stream_length_ < length_ && stream_length_ < vectors;
    full_vectors_ = may_be_short_ ? round_up(vectors, length_) : stream_vectors_;
    int64_t longest = length_;
    if (group_length_ > longest) longest = group_length_;
    if (kept_length_ > longest) longest = kept_length_;

    const int64_t row = blocks() * kRowPad;
    bias_ = op.bias != nullptr ? scratch.take<float>(row) : nullptr;
    z_ = scratch.take<float>(grouped ? kLanes * row : row);
    s_ = scratch.take<float>(row);
    q_ = scratch.take<float>(row);
    ordered_ = scratch.take<uint32_t>(row);
    complement_ = scratch.take<uint64_t>(op.E);
    candidates_ = scratch.take<double>((may_be_short_ ? kLanes : 1) * full_vectors_ * kLanes);
    group_rows_ = grouped ? scratch.take<double>(kLanes * group_row()) : nullptr;
    group_candidates_ = grouped ? scratch.take<double>(all_groups_ * kLanes) : nullptr;
    kept_groups_ = grouped ? scratch.take<int32_t>(op.group_topk * kLanes) : nullptr;
    lists_ = scratch.take<double>(longest * kLanes * kLanes);
    chunk_ = scratch.take<double>(longest * kLanes);
    experts_ = scratch.take<int32_t>(K * kLanes);
    weights_ = scratch.take<float>(K * kLanes);
    size_ = scratch.used();
    if (memory == nullptr) return;
    for (int64_t e = 0; e < op.E; ++e) complement_[e] = 0x7fffffffu - static_cast<uint64_t>(e);
    if (bias_ != nullptr) load_row(op.bias, op.bias_dtype, 0, op.E, 0.0f, bias_);
  }

  size_t size() const { return size_; }

  // Routes tokens first <= t < first + n, n <= kLanes.
  void route(int64_t first, int n, int32_t* counts, float* score_sum) {
    for (int lane = 0; lane < n; ++lane) {
      live_[lane] = op_.token_mask == nullptr || op_.token_mask[first + lane] != 0;
      if (live_[lane]) {
        score(first + lane, lane, score_sum);
      } else {
        skip(first + lane);
      }
    }
    for (int lane = n; lane < kLanes; ++lane) live_[lane] = false;
    if (op_.lse != nullptr) write_lse(first, n);
    if (!op_.wants_selection) return;
    if (op_.forced) {
      take_forced(first);
    } else {
      select();
    }
    if (op_.wants_weights) {
      gather_logits(op_.logits, op_.logits_dtype, op_.E, op_.K, first, experts_, weights_);
      score_slots(op_.score_function, op_.normalize, op_.K, softmax_, weights_, nullptr);
    }
    for (int lane = 0; lane < n; ++lane) write(first + lane, lane, counts);
  }

 private:
  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

  int64_t blocks() const { return row_blocks(op_.E); }
  int64_t group_row() const { return groups_ * group_vectors_ * kLanes; }
  double* list(int lane, int length) { return lists_ + static_cast<int64_t>(lane) * length * kLanes; }
  double* candidates(int lane) { return candidates_ + (may_be_short_ ? lane : 0) * full_vectors_ * kLanes; }
  bool selects_by_network() const { return op_.wants_selection && !op_.forced; }
  // Group scores add up z (normalised softmax without a bias), else s + b.
  bool groups_by_logits() const { return op_.score_function == AB_SOFTMAX && op_.normalize && bias_ == nullptr; }

  // The row of token t: statistics, auxiliary scores, and the candidates of its lane.
  void score(int64_t t, int lane, float* score_sum) {
    const int64_t E = op_.E;
    const bool grouped = selects_by_network() && op_.num_groups > 0;
    const bool by_score = selects_by_network() && (bias_ != nullptr || (grouped && !groups_by_logits()));
    const bool auxiliary = score_sum != nullptr || op_.aux_scores != nullptr;
    const bool is_softmax = op_.score_function == AB_SOFTMAX;
    const float* z = logits_row(op_.logits, op_.logits_dtype, t, E, z_ + (grouped ? lane : 0) * blocks() * kRowPad);
    rows_[lane] = z;

    if (op_.lse != nullptr || (is_softmax && (auxiliary || by_score || (op_.wants_weights && !op_.normalize)))) {
      softmax_.shift[lane] = row_max(z, blocks());
      softmax_.factor[lane] = softmax_row(z, blocks(), softmax_.shift[lane], s_, &softmax_.sum[lane]);
      softmax_.poison[lane] = softmax_.sum[lane] - softmax_.sum[lane];  // NaN where the sum is
    } else if (is_softmax && op_.wants_weights) {
      softmax_.poison[lane] = row_is_broken(z, blocks()) ? __builtin_nanf("") : 0.0f;
    }
    if (auxiliary || by_score) {
      float factor = softmax_.factor[lane];
      if (!is_softmax) {
        score_row(op_.score_function, z, blocks() * kRowPad, s_);
        factor = auxiliary ? 1.0f / (row_sum(s_, blocks()) + kSumEpsilon) : 1.0f;
      }
      if (score_sum != nullptr) {
        for (int64_t e = 0; e < E; ++e) score_sum[e] += s_[e] * factor;
      }
      if (op_.aux_scores != nullptr) {
        float* out = op_.aux_scores + t * E;
        for (int64_t e = 0; e < E; ++e) out[e] = s_[e] * factor;
      }
      if (by_score) key_row(z, is_softmax ? factor : 1.0f);
    }
    if (!selects_by_network()) return;
    const float* q = by_score ? q_ : z;
    if (grouped) {
      double* out = group_rows_ + lane * group_row();
      for (int64_t group = 0; group < groups_; ++group) {
        pack(q, group * group_size_, group_size_, group_vectors_, out + group * group_vectors_ * kLanes);
      }
    } else {
      pack(q, 0, E, full_vectors_, candidates(lane));
      stream(lane, stream_length_, stream_vectors_);
    }
  }

  // q = s + b, and -inf where z = -inf.
  void key_row(const float* z, float factor) {
    for (int64_t e = 0; e < op_.E; ++e) {
      const float bias = bias_ == nullptr ? 0.0f : bias_[e];
      q_[e] = z[e] == -__builtin_inff() ? z[e] : s_[e] * factor + bias;
    }
  }

  // The selection keys (score.h) of `count` experts from `first`, filled up to `vectors` vectors with "none".
  void pack(const float* q, int64_t first, int64_t count, int64_t vectors, double* out) {
    const uint64_t* complement = complement_ + first;
    for (int64_t i = 0; i < count; ++i) ordered_[i] = ordered_bits(q[first + i]);
    for (int64_t i = 0; i < count; ++i) {
      out[i] = __builtin_bit_cast(double, static_cast<uint64_t>(ordered_[i]) << 31 | complement[i]);
    }
    for (int64_t i = count; i < vectors * kLanes; ++i) out[i] = 0.0;
  }

  void stream(int lane, int length, int64_t vectors) {
    top_of_lanes(length, candidates(lane), vectors, list(lane, length_), chunk_);
    store(last_ + lane * kLanes, load(list(lane, length_) + (length - 1) * kLanes));
  }

  void clear(int lane, int length) {
    double* out = list(lane, length);
    for (int64_t i = 0; i < static_cast<int64_t>(length) * kLanes; ++i) out[i] = 0.0;
  }

  // experts_[k][lane] from the candidates of every lane.
  void select() {
    if (op_.num_groups > 0) {
      select_groups();
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!live_[lane]) continue;
        gather_kept(lane);
        stream(lane, stream_length_, stream_vectors_);
      }
    }
    join(stream_length_);
    if (may_be_short_ && stream_is_short()) {
      for (int lane = 0; lane < kLanes; ++lane) {
        if (live_[lane]) stream(lane, length_, full_vectors_);
      }
      join(length_);
    }
    for (int64_t k = 0; k < op_.K; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int32_t expert = key_index(__builtin_bit_cast(uint64_t, lists_[k * kLanes + lane]));
        experts_[k * kLanes + lane] = live_[lane] ? expert : -1;
      }
    }
  }

  void join(int from) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!live_[lane]) clear(lane, length_);
    }
    join_tokens(from, length_, lists_, static_cast<int64_t>(length_) * kLanes);
  }

  // Whether all of some lane's list is among its token's K best.
  bool stream_is_short() const {
    for (int token = 0; token < kLanes; ++token) {
      if (!live_[token]) continue;
      const double least = lists_[(op_.K - 1) * static_cast<int64_t>(kLanes) + token];
      for (int lane = 0; lane < kLanes; ++lane) {
        if (last_[token * kLanes + lane] >= least) return true;
      }
    }
    return false;
  }

  // kept_groups_[j][lane]: the group_topk best groups, by the sum of their K / group_topk best candidates.
  void select_groups() {
    const int64_t per_group = op_.K / op_.group_topk;
    for (int64_t group = 0; group < groups_; ++group) {
      for (int lane = 0; lane < kLanes; ++lane) {
        if (live_[lane]) {
          top_of_lanes(group_length_, group_rows_ + lane * group_row() + group * group_vectors_ * kLanes,
                       group_vectors_, list(lane, group_length_), chunk_);
        } else {
          clear(lane, group_length_);
        }
      }
      join_tokens(group_length_, group_length_, lists_, static_cast<int64_t>(group_length_) * kLanes);
      for (int lane = 0; lane < kLanes; ++lane) {
        float sum = 0.0f;
        for (int64_t k = 0; k < per_group; ++k) {
          sum += key_value(__builtin_bit_cast(uint64_t, lists_[k * kLanes + lane]));
        }
        const uint64_t key = selection_key(sum, static_cast<uint32_t>(group));
        group_candidates_[group * kLanes + lane] = __builtin_bit_cast(double, key);
      }
    }
    for (int64_t i = groups_ * kLanes; i < all_groups_ * kLanes; ++i) group_candidates_[i] = 0.0;
    top_of_lanes(kept_length_, group_candidates_, all_groups_, lists_, chunk_);
    for (int64_t i = 0; i < static_cast<int64_t>(op_.group_topk) * kLanes; ++i) {
      kept_groups_[i] = key_index(__builtin_bit_cast(uint64_t, lists_[i]));
    }
  }

  // The candidates of a lane's kept groups, one group after another.
  void gather_kept(int lane) {
    const int64_t size = group_vectors_ * kLanes;
    double* out = candidates(lane);
    for (int64_t j = 0; j < op_.group_topk; ++j, out += size) {
      const int64_t group = kept_groups_[j * kLanes + lane];
      if (bias_ != nullptr || groups_by_logits()) {
        __builtin_memcpy(out, group_rows_ + lane * group_row() + group * size,
                         static_cast<size_t>(size) * sizeof(double));
      } else {
        pack(rows_[lane], group * group_size_, group_size_, group_vectors_, out);
      }
    }
    for (const double* end = candidates(lane) + full_vectors_ * kLanes; out < end; ++out) *out = 0.0;
  }

  void take_forced(int64_t first) {
    for (int64_t k = 0; k < op_.K; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int32_t e = live_[lane] ? op_.forced_experts[(first + lane) * op_.K + k] : -1;
        experts_[k * kLanes + lane] = e >= 0 && e < op_.E ? e : -1;
      }
    }
  }

  void write_lse(int64_t first, int n) {
    float lse[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lse[lane] = softmax_.shift[lane] + log_f32(softmax_.sum[lane]);
    for (int lane = 0; lane < n; ++lane) op_.lse[first + lane] = live_[lane] ? lse[lane] : 0.0f;
  }

  // A masked token scores nothing.
  void skip(int64_t t) {
    if (op_.aux_scores == nullptr) return;
    for (int64_t e = 0; e < op_.E; ++e) op_.aux_scores[t * op_.E + e] = 0.0f;
  }

  void write(int64_t t, int lane, int32_t* counts) {
    const int64_t K = op_.K;
    for (int64_t k = 0; k < K; ++k) {
      const int32_t e = experts_[k * kLanes + lane];
      float& weight = weights_[k * kLanes + lane];
      weight = e < 0 ? 0.0f : weight * op_.scaling_factor;
      if (op_.weights != nullptr) op_.weights[t * K + k] = weight;
      if (op_.experts != nullptr) op_.experts[t * K + k] = e;
      if (counts != nullptr && e >= 0) ++counts[e];
    }
    if (op_.probs != nullptr) {
      with_float_type(op_.logits_dtype, [&]<class T>(T) {
        T* row = static_cast<T*>(op_.probs) + t * op_.E;
        __builtin_memset(row, 0, static_cast<size_t>(op_.E) * sizeof(T));
        for (int64_t k = 0; k < K; ++k) {
          const int32_t e = experts_[k * kLanes + lane];
          if (e >= 0) row[e] = from_float<T>(weights_[k * kLanes + lane]);
        }
      });
    }
    switch (op_.map_format) {
      case MapFormat::none: return;
      case MapFormat::bytes: return write_bytes(t, lane);
      case MapFormat::bits: return write_bits(t, lane);
      case MapFormat::indices: break;
    }
    switch (op_.map_dtype) {
      case AB_INT16: return write_indices<int16_t>(t, lane);
      case AB_INT64: return write_indices<int64_t>(t, lane);
      default: return write_indices<int32_t>(t, lane);
    }
  }

  void write_bytes(int64_t t, int lane) const {
    uint8_t* row = static_cast<uint8_t*>(op_.routing_map) + t * op_.E;
    __builtin_memset(row, 0, static_cast<size_t>(op_.E));
    for (int64_t k = 0; k < op_.K; ++k) {
      const int32_t e = experts_[k * kLanes + lane];
      if (e >= 0) row[e] = 1;
    }
  }

  void write_bits(int64_t t, int lane) const {
    const int64_t bytes = (op_.E + 7) / 8;
    uint8_t* row = static_cast<uint8_t*>(op_.routing_map) + t * bytes;
    __builtin_memset(row, 0, static_cast<size_t>(bytes));
    for (int64_t k = 0; k < op_.K; ++k) {
      const int32_t e = experts_[k * kLanes + lane];
      if (e >= 0) row[e / 8] = static_cast<uint8_t>(row[e / 8] | 1u << e % 8);
    }
  }

  template <class Index>
  void write_indices(int64_t t, int lane) const {
    Index* row = static_cast<Index*>(op_.routing_map) + t * op_.K;
    for (int64_t k = 0; k < op_.K; ++k) row[k] = static_cast<Index>(experts_[k * kLanes + lane]);
  }

  const RouterForward& op_;
  const int64_t groups_;      // 1 without groups
  const int64_t group_size_;  // experts of a group
  int64_t group_vectors_;     // vectors of candidates of a group,
  int64_t all_groups_;        // of all groups, a group a vector,
  int64_t stream_vectors_;    // of a token (of its kept groups): in whole chunks of stream_length,
  int64_t full_vectors_;      // and of length where the stream may be short
  int length_;                // of the lists of the K best experts,
  int stream_length_;         // of those that they start from,
  int group_length_;          // of a group's K / group_topk best,
  int kept_length_;           // of the group_topk best groups
  bool may_be_short_;
  size_t size_;

  float* bias_;               // [E], or null
  float* z_;                  // rows of logits, where they need conversion or padding; with groups one a lane
  float* s_;                  // a row of scores, for softmax before the division by their sum
  float* q_;                  // a row of selection keys where they are not z
  uint32_t* ordered_;         // a row of their ordered bits
  uint64_t* complement_;      // [E]: the lower bits of an expert's key
  double* candidates_;        // [full_vectors][kLanes], of each lane where the stream may be short
  double* group_rows_;        // [kLanes][groups][group_vectors * kLanes]
  double* group_candidates_;  // [all_groups][kLanes]
  int32_t* kept_groups_;      // [group_topk][kLanes]
  double* lists_;             // a list for each lane
  double* chunk_;
  int32_t* experts_;  // [K][kLanes]
  float* weights_;    // [K][kLanes]
  LaneSoftmax softmax_;
  const float* rows_[kLanes] = {};
  double last_[kLanes * kLanes] = {};  // the last vector of each lane's list
  bool live_[kLanes] = {};
};

void route(const RouterForward& op, int64_t begin, int64_t end, int32_t* counts, float* score_sum, void* scratch) {
  for (int64_t e = 0; e < op.E; ++e) {
    if (counts != nullptr) counts[e] = 0;
    if (score_sum != nullptr) score_sum[e] = 0.0f;
  }
  Tile tile(op, scratch);
  for (int64_t t = begin; t < end; t += kLanes) {
    tile.route(t, static_cast<int>(end - t < kLanes ? end - t : kLanes), counts, score_sum);
  }
}

size_t scratch_size(const RouterForward& op) { return Tile(op, nullptr).size(); }

}  // namespace

const RouterForwardKernels kRouterForward = {route, scratch_size};

}  // namespace anabranch::AB_ISA
