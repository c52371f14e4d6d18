#include "router/forward.h"

#include "router/cpu/candidates.h"
#include "router/cpu/scratch.h"
#include "router/cpu/slots.h"
#include "router/cpu/topk.h"
#include "router/quantile.h"

namespace anabranch::AB_ISA {
namespace {

// Processes kLanes tokens together: reads their rows one by one, then selects experts and computes weights with one
// token per lane. float64 keys are processed for kKeyLanes tokens at a time.
class Tile {
 public:
  Tile(const RouterForward& op, void* memory)
      : op_(op), groups_(op.num_groups > 0 ? op.num_groups : 1), group_size_(op.E / groups_) {
    Scratch scratch(memory);
    const bool grouped = op.num_groups > 0;
    const int64_t K = op.K;
    count_ = grouped ? op.group_topk * group_size_ : op.E;
    sets_ = bound_sets(op.ranks(), row_blocks(count_));
    length_ = list_length(op.ranks());
    group_length_ = grouped ? list_length(op.group_score_topk) : 1;
    selected_length_ = grouped ? list_length(op.group_topk) : 1;
    group_vectors_ = round_up(group_size_, group_length_);
    all_groups_ = grouped ? round_up(groups_, selected_length_) : 0;
    const int64_t longest = larger(larger(length_, group_length_), selected_length_);
    const int64_t max_numbers = larger(grouped ? group_vectors_ : 0, sets_ * kRowPad);

    const int64_t row = blocks() * kRowPad;
    bias_ = op.bias != nullptr ? scratch.take<float>(row) : nullptr;
    z_ = scratch.take<float>(kLanes * row);
    s_ = scratch.take<float>(balances() ? kLanes * row : row);
    bins_ = scratch.take<int32_t>(balances() ? kPlacedTokens * row : 0);
    q_ = scratch.take<float>(op.bias != nullptr || grouped ? kLanes * row : 0);
    group_rows_ = scratch.take<float>(grouped ? kLanes * row_blocks(count_) * kRowPad : 0);
    maxima_ = scratch.take<float>(kLanes * sets_ * kRowPad);
    all_ = scratch.take<int32_t>(count_ + kKeysAtOnce);
    places_ = scratch.take<int32_t>(grouped ? count_ : 0);
    positions_ = scratch.take<int32_t>(count_ + kKeysAtOnce);
    values_ = scratch.take<float>(count_ + kKeysAtOnce);
    keys_ = scratch.take<double>(kKeyLanes * key_row_length());
    key_lanes_ = scratch.take<double>(round_up(count_, length_) * kKeyLanes);
    key_list_ = scratch.take<double>(longest * kKeyLanes);
    key_chunk_ = scratch.take<double>(longest * kKeyLanes);
    number_lanes_ = scratch.take<float>(max_numbers * kLanes);
    number_list_ = scratch.take<float>(longest * kLanes);
    number_chunk_ = scratch.take<float>(longest * kLanes);
    group_keys_ = scratch.take<double>(all_groups_ * kLanes);
    selected_groups_ = scratch.take<int32_t>(op.group_topk * kLanes);
    experts_ = scratch.take<int32_t>(K * kLanes);
    weights_ = scratch.take<float>(K * kLanes);
    size_ = scratch.used();
    if (memory == nullptr) return;
    if (bias_ != nullptr) load_row(op.bias, op.bias_dtype, 0, op.E, 0.0f, bias_);
    for (int64_t i = 0; i < count_; ++i) all_[i] = static_cast<int32_t>(i);
    if (grouped) {
      for (int64_t i = 0; i < count_; ++i) places_[i] = static_cast<int32_t>(i / group_size_);
    }
  }

  size_t size() const { return size_; }

  // Routes tokens first <= t < first + n, n <= kLanes.
  void route(int64_t first, int n, int32_t* counts, float* score_sum, int32_t* histogram) {
    for (int lane = 0; lane < n; ++lane) {
      unmasked_[lane] = op_.token_mask == nullptr || op_.token_mask[first + lane] != 0;
      if (unmasked_[lane]) read(first + lane, lane, score_sum);
    }
    for (int lane = 0; lane < n; ++lane) {
      if (unmasked_[lane]) {
        score(first + lane, lane, score_sum);
      } else {
        skip(first + lane);
      }
    }
    for (int lane = n; lane < kLanes; ++lane) unmasked_[lane] = false;
    if (op_.lse != nullptr) write_lse(first, n);
    if (!op_.needs_selection) return;
    if (op_.forced) {
      read_forced(first);
    } else {
      select();
    }
    if (histogram != nullptr) {
      place_bins();
      if (placed_ + kLanes > kPlacedTokens) count_bins(histogram);
    }
    if (op_.needs_weights) {
      gather_logits(op_.logits, op_.logits_dtype, op_.E, op_.K, first, experts_, weights_);
      score_slots(op_.score_function, op_.normalize, op_.K, softmax_, weights_, nullptr);
    }
    write(first, n, counts);
  }

  // histogram[e][bin] += 1 for each expert of the stored tokens that has a bin. Processes a few experts at a time, so
  // that their counts stay in L1.
  void count_bins(int32_t* histogram) {
    for (int64_t first = 0; first < op_.E; first += kRowsAtOnce) {
      const int64_t n = op_.E - first < kRowsAtOnce ? op_.E - first : kRowsAtOnce;
      int32_t* rows[kRowsAtOnce];
      for (int64_t e = 0; e < kRowsAtOnce; ++e) rows[e] = histogram + (first + (e < n ? e : 0)) * op_.qb_bins;
      for (int64_t token = 0; token < placed_; ++token) {
        const int32_t* const places = bins_ + token * blocks() * kRowPad + first;
#pragma GCC unroll 8
        for (int64_t e = 0; e < kRowsAtOnce; ++e) {
          if (places[e] >= 0 && e < n) ++rows[e][places[e]];
        }
      }
    }
    placed_ = 0;
  }

 private:
  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

  static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

  static constexpr int kKeyLanes = kWidth<double>;
  static_assert(kLanes % kKeyLanes == 0 && kWidth<float> == kLanes, "a vector of floats holds whole vectors of keys");
  // Keys are written in batches; the last batch may exceed the end.
  static constexpr int64_t kKeysAtOnce = 8;

  // The number of tokens whose bins are stored, and the number of experts that are counted at a time, whose counts stay
  // in L1.
  static constexpr int64_t kPlacedTokens = 128;
  static constexpr int64_t kRowsAtOnce = 8;

  int64_t blocks() const { return row_blocks(op_.E); }
  int64_t key_row_length() const { return round_up(count_, length_) + kKeysAtOnce; }
  bool balances() const { return op_.qb_histogram != nullptr; }
  // The row of scores of a lane, up to the factor factors_[lane]. Quantile balancing saves the rows of all lanes.
  float* scores(int lane) { return s_ + (balances() ? lane * blocks() * kRowPad : 0); }
  bool selects() const { return op_.needs_selection && !op_.forced; }
  // Whether the bound comes from the logits: the maxima of their parts then also yield the maximum of the row.
  bool bounded_by_logits() const { return selects() && sets_ > 0 && bias_ == nullptr && op_.num_groups == 0; }
  float* maxima(int lane) { return maxima_ + lane * sets_ * kRowPad; }

  bool needs_auxiliary(const float* score_sum) const { return score_sum != nullptr || op_.aux_scores != nullptr; }
  // Whether experts or groups are ranked by score.
  bool ranks_by_score() const {
    return selects() && (bias_ != nullptr || (op_.num_groups > 0 && !op_.groups_by_logits));
  }

  // Whether the exponentials of all logits are summed, for the softmax of the row or for lse.
  bool needs_softmax(const float* score_sum) const {
    return op_.lse != nullptr || (op_.score_function == AB_SOFTMAX && (needs_auxiliary(score_sum) || ranks_by_score() ||
                                                                       (op_.needs_weights && !op_.normalize)));
  }

  // Reads the row of token t, and computes its maximum and those of its parts. This is a separate pass, so that the
  // maximum of the next row does not wait for the sum of exponentials of this row, which depends on its maximum.
  void read(int64_t t, int lane, const float* score_sum) {
    const float* z = logits_row(op_.logits, op_.logits_dtype, t, op_.E, z_ + lane * blocks() * kRowPad);
    rows_[lane] = z;
    if (bounded_by_logits()) part_maxima(z, blocks(), sets_, maxima(lane));
    if (needs_softmax(score_sum)) {
      softmax_.shift[lane] = bounded_by_logits() ? row_max(maxima(lane), sets_) : row_max(z, blocks());
    }
  }

  // Processes the row of token t: statistics, auxiliary scores, and the values that rank its experts and groups.
  void score(int64_t t, int lane, float* score_sum) {
    const int64_t E = op_.E;
    const bool by_score = ranks_by_score();
    const bool auxiliary = needs_auxiliary(score_sum);
    const bool is_softmax = op_.score_function == AB_SOFTMAX;
    const float* z = rows_[lane];
    float* s = scores(lane);
    float* q = q_ + lane * blocks() * kRowPad;

    if (needs_softmax(score_sum)) {
      const bool saves_exponentials = is_softmax && (auxiliary || by_score);
      softmax_.sum[lane] = saves_exponentials ? softmax_row(z, blocks(), softmax_.shift[lane], s)
                                              : softmax_sum(z, blocks(), softmax_.shift[lane]);
      softmax_.factor[lane] = 1.0f / softmax_.sum[lane];
      softmax_.nan_or_zero[lane] = softmax_.sum[lane] - softmax_.sum[lane];  // NaN if the sum is NaN or infinite
    } else if (is_softmax && op_.needs_weights) {
      softmax_.nan_or_zero[lane] = row_has_nan_or_inf(z, blocks()) ? __builtin_nanf("") : 0.0f;
    }
    if (auxiliary || by_score) {
      float factor = softmax_.factor[lane];
      if (!is_softmax) {
        score_row(op_.score_function, z, blocks() * kRowPad, s);
        factor = auxiliary ? 1.0f / (row_sum(s, blocks()) + kSumEpsilon) : 1.0f;
      }
      if (score_sum != nullptr) {
        for (int64_t e = 0; e < E; ++e) score_sum[e] += s[e] * factor;
      }
      if (op_.aux_scores != nullptr) {
        float* out = op_.aux_scores + t * E;
        for (int64_t e = 0; e < E; ++e) out[e] = s[e] * factor;
      }
      factors_[lane] = is_softmax ? factor : 1.0f;
      if (by_score) key_row(z, s, factors_[lane], q);
    }
    ranks_[lane] = bias_ != nullptr ? q : z;
    group_ranks_[lane] = by_score ? q : z;
  }

  // q = s + b, or -inf where z = -inf.
  void key_row(const float* z, const float* s, float factor, float* q) const {
    const auto write = [&](const auto& make_key) {
      for (int64_t e = 0; e < blocks() * kRowPad; ++e) q[e] = z[e] == -__builtin_inff() ? z[e] : make_key(e);
    };
    if (bias_ != nullptr) {
      write([s, b = bias_, factor](int64_t e) { return s[e] * factor + b[e]; });
    } else {
      write([s, factor](int64_t e) { return s[e] * factor; });
    }
  }

  // experts_[k][lane] = the selected experts, best first.
  void select() {
    int some = 0;
    while (some < kLanes && !unmasked_[some]) ++some;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (unmasked_[lane] || some == kLanes) continue;
      ranks_[lane] = ranks_[some];
      group_ranks_[lane] = group_ranks_[some];
    }
    if (some < kLanes) {
      if (op_.num_groups > 0) select_groups();
      find_bounds();
    }
    for (int lane = 0; lane < kLanes; lane += kKeyLanes) select_by_keys(lane);
  }

  // Selects the experts of kKeyLanes lanes by their keys.
  void select_by_keys(int first_lane) {
    bool some = false;
    for (int lane = first_lane; lane < first_lane + kKeyLanes; ++lane) some |= unmasked_[lane];
    if (some) lane_topk(length_, key_lanes_, gather_keys(first_lane), key_list_, key_chunk_);
    for (int64_t k = 0; k < op_.K; ++k) {
      for (int i = 0; i < kKeyLanes; ++i) {
        const int lane = first_lane + i;
        const int32_t expert = key_index(__builtin_bit_cast(uint64_t, key_list_[k * kKeyLanes + i]));
        experts_[k * kLanes + lane] = unmasked_[lane] ? expert : -1;
      }
    }
    for (int i = 0; balances() && i < kKeyLanes; ++i) {
      thresholds_[first_lane + i] = key_value(__builtin_bit_cast(uint64_t, key_list_[op_.K * kKeyLanes + i]));
    }
  }

  // Stores the bins of the lanes' experts for count_bins.
  void place_bins() {
    const QuantileBins bins(op_.qb_bin_bounds, op_.qb_bins);
    const int64_t row = blocks() * kRowPad;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!unmasked_[lane]) continue;
      const float* s = scores(lane);
      int32_t* places = bins_ + placed_++ * row;
      for (int64_t e = 0; e < row; ++e) {
        const float x = bins.position(thresholds_[lane], s[e] * factors_[lane]);
        const float position = at_most(at_least(x, 0.0f), bins.last);
        places[e] = static_cast<int32_t>(position == position ? position : -1.0f);
      }
    }
  }

  // bounds_[lane] = a value that at least op_.ranks() elements of the lane reach.
  void find_bounds() {
    for (float& bound : bounds_) bound = -__builtin_inff();
    if (sets_ == 0) return;
    const int64_t parts = sets_ * kRowPad;
    const float* rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool known = bounded_by_logits() && unmasked_[lane];
      if (!known) part_maxima(ranks_[lane], row_blocks(count_), sets_, maxima(lane));
      rows[lane] = maxima(lane);
    }
    transpose_rows(rows, 0, parts, number_lanes_);
    lane_topk(length_, number_lanes_, parts, number_list_, number_chunk_);
    __builtin_memcpy(bounds_, number_list_ + (op_.ranks() - 1) * static_cast<int64_t>(kLanes), sizeof(bounds_));
  }

  // key_lanes_[i][lane] = the selection keys of the lane's elements at or above its bound, padded with "none", for
  // kKeyLanes lanes. Returns the number of vectors.
  int64_t gather_keys(int first_lane) {
    int64_t n[kKeyLanes];
    int64_t max_count = 0;
    for (int i = 0; i < kKeyLanes; ++i) {
      n[i] = write_keys(first_lane + i, keys_ + i * key_row_length());
      max_count = larger(max_count, n[i]);
    }
    const int64_t vectors = whole_chunks(max_count, length_);
    const double* rows[kKeyLanes];
    for (int i = 0; i < kKeyLanes; ++i) {
      double* keys = keys_ + i * key_row_length();
      for (int64_t j = n[i] + kKeysAtOnce; j < vectors; ++j) keys[j] = 0.0;
      rows[i] = keys;
    }
    transpose_rows(rows, 0, vectors, key_lanes_);
    return vectors;
  }

  // Writes the selection keys (score.h) of the lane's elements at or above its bound, then kKeysAtOnce times "none".
  // Returns the number of keys.
  int64_t write_keys(int lane, double* keys) {
    const float* values = ranks_[lane];
    const int32_t* experts = all_;
    int64_t n = unmasked_[lane] ? count_ : 0;
    if (n > 0 && sets_ > 0) {
      n = elements_not_below(bounds_[lane], op_.ranks(), values, count_, positions_, values_);
      values = values_;
      experts = positions_;
    }
    if (op_.num_groups > 0) {
      const auto size = static_cast<int32_t>(group_size_);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t place = places_[experts[i]];
        positions_[i] = experts[i] + (selected_groups_[place * kLanes + lane] - place) * size;
      }
      experts = positions_;
    }
    for (int64_t first = 0; first < n; first += kKeysAtOnce) {
      uint32_t ordered[kKeysAtOnce];
      for (int64_t i = 0; i < kKeysAtOnce; ++i) ordered[i] = ordered_bits(values[first + i]);
      for (int64_t i = 0; i < kKeysAtOnce; ++i) {
        const uint64_t index = 0x7fffffffu - static_cast<uint32_t>(experts[first + i]);
        keys[first + i] = __builtin_bit_cast(double, static_cast<uint64_t>(ordered[i]) << 31 | index);
      }
    }
    __builtin_memset(keys + n, 0, kKeysAtOnce * sizeof(double));
    return n;
  }

  // Selects the group_topk best groups of each lane, by the sum of their group_score_topk best elements, and gathers
  // their elements into the lane's row.
  void select_groups() {
    for (int64_t i = group_size_ * kLanes; i < group_vectors_ * kLanes; ++i) number_lanes_[i] = -__builtin_inff();
    for (int64_t i = 0; i < all_groups_ * kLanes; ++i) group_keys_[i] = 0.0;
    for (int64_t group = 0; group < groups_; ++group) {
      transpose_rows(group_ranks_, group * group_size_, group_size_, number_lanes_);
      lane_topk(group_length_, number_lanes_, group_vectors_, number_list_, number_chunk_);
      for (int lane = 0; lane < kLanes; ++lane) {
        float sum = 0.0f;
        for (int64_t k = 0; k < op_.group_score_topk; ++k) sum += number_list_[k * kLanes + lane];
        group_key(group, lane) = __builtin_bit_cast(double, selection_key(sum, static_cast<uint32_t>(group)));
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) place_nan_groups(lane);
    for (int first_lane = 0; first_lane < kLanes; first_lane += kKeyLanes) {
      lane_topk(selected_length_, &group_key(0, first_lane), all_groups_, key_list_, key_chunk_);
      for (int i = 0; i < kKeyLanes; ++i) {
        for (int64_t j = 0; j < op_.group_topk; ++j) {
          insert_selected_group(first_lane + i, j,
                                key_index(__builtin_bit_cast(uint64_t, key_list_[j * kKeyLanes + i])));
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) gather_groups(lane);
  }

  // Inserts a group into the lane's `count` selected groups in ascending order. Among equal elements of a row the first
  // ones win (elements_not_below), so the row must contain experts in ascending order.
  void insert_selected_group(int lane, int64_t count, int32_t group) {
    for (; count > 0 && selected_groups_[(count - 1) * kLanes + lane] > group; --count) {
      selected_groups_[count * kLanes + lane] = selected_groups_[(count - 1) * kLanes + lane];
    }
    selected_groups_[count * kLanes + lane] = group;
  }

  double& group_key(int64_t group, int lane) {
    return group_keys_[(lane / kKeyLanes * all_groups_ + group) * kKeyLanes + lane % kKeyLanes];
  }

  // A NaN element makes the sum of its group NaN, which ranks highest. Sorting networks lose NaN, so set these keys
  // separately.
  void place_nan_groups(int lane) {
    const float* ranks = group_ranks_[lane];
    if (!row_has_nan(ranks, blocks())) return;
    for (int64_t e = 0; e < op_.E; ++e) {
      if (ranks[e] == ranks[e]) continue;
      const int64_t group = e / group_size_;
      const uint64_t key = selection_key(ranks[e], static_cast<uint32_t>(group));
      group_key(group, lane) = __builtin_bit_cast(double, key);
    }
  }

  // Gathers the lane's selected groups into one contiguous row.
  void gather_groups(int lane) {
    const int64_t padded = row_blocks(count_) * kRowPad;
    float* row = group_rows_ + lane * padded;
    for (int64_t j = 0; j < op_.group_topk; ++j) {
      const float* group = ranks_[lane] + selected_groups_[j * kLanes + lane] * group_size_;
      __builtin_memcpy(row + j * group_size_, group, static_cast<size_t>(group_size_) * sizeof(float));
    }
    for (int64_t i = count_; i < padded; ++i) row[i] = -__builtin_inff();
    ranks_[lane] = row;
  }

  void read_forced(int64_t first) {
    for (int64_t k = 0; k < op_.K; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int32_t e = unmasked_[lane] ? op_.forced_experts[(first + lane) * op_.K + k] : -1;
        experts_[k * kLanes + lane] = e >= 0 && e < op_.E ? e : -1;
      }
    }
  }

  void write_lse(int64_t first, int n) {
    float lse[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lse[lane] = softmax_.shift[lane] + log_f32(softmax_.sum[lane]);
    for (int lane = 0; lane < n; ++lane) op_.lse[first + lane] = unmasked_[lane] ? lse[lane] : 0.0f;
  }

  // A masked token has zero auxiliary scores.
  void skip(int64_t t) {
    if (op_.aux_scores == nullptr) return;
    for (int64_t e = 0; e < op_.E; ++e) op_.aux_scores[t * op_.E + e] = 0.0f;
  }

  // Writes the results of n tokens.
  void write(int64_t first, int n, int32_t* counts) {
    const int64_t K = op_.K;
    for (int64_t k = 0; k < K; ++k) {
      for (int lane = 0; lane < n; ++lane) {
        const int32_t e = experts_[k * kLanes + lane];
        float& weight = weights_[k * kLanes + lane];
        weight = e < 0 ? 0.0f : weight * op_.scaling_factor;
        if (op_.weights != nullptr) op_.weights[(first + lane) * K + k] = weight;
        if (op_.experts != nullptr) op_.experts[(first + lane) * K + k] = e;
        if (counts != nullptr && e >= 0) ++counts[e];
      }
    }
    if (op_.probs != nullptr) {
      with_float_type(op_.logits_dtype, [&]<class T>(T) {
        write_dense(static_cast<T*>(op_.probs), first, n, op_.E,
                    [&](T* row, int32_t e, int64_t slot) { row[e] = from_float<T>(weights_[slot]); });
      });
    }
    auto* bytes = static_cast<uint8_t*>(op_.routing_map);
    switch (op_.map_format) {
      case MapFormat::none: return;
      case MapFormat::bytes:
        return write_dense(bytes, first, n, op_.E, [](uint8_t* row, int32_t e, int64_t) { row[e] = 1; });
      case MapFormat::bits:
        return write_dense(bytes, first, n, (op_.E + 7) / 8, [](uint8_t* row, int32_t e, int64_t) {
          row[e / 8] = static_cast<uint8_t>(row[e / 8] | 1u << e % 8);
        });
      case MapFormat::indices: break;
    }
    switch (op_.map_dtype) {
      case AB_INT16: return write_indices<int16_t>(first, n);
      case AB_INT64: return write_indices<int64_t>(first, n);
      default: return write_indices<int32_t>(first, n);
    }
  }

  // Writes rows of zeros, and calls set(row, expert, slot) for the selected experts.
  template <class T, class Set>
  void write_dense(T* out, int64_t first, int n, int64_t width, const Set& set) const {
    __builtin_memset(out + first * width, 0, static_cast<size_t>(n * width) * sizeof(T));
    for (int lane = 0; lane < n; ++lane) {
      T* row = out + (first + lane) * width;
      for (int64_t slot = lane; slot < op_.K * kLanes; slot += kLanes) {
        if (experts_[slot] >= 0) set(row, experts_[slot], slot);
      }
    }
  }

  template <class Index>
  void write_indices(int64_t first, int n) const {
    auto* out = static_cast<Index*>(op_.routing_map);
    for (int lane = 0; lane < n; ++lane) {
      for (int64_t k = 0; k < op_.K; ++k) {
        out[(first + lane) * op_.K + k] = static_cast<Index>(experts_[k * kLanes + lane]);
      }
    }
  }

  const RouterForward& op_;
  const int64_t groups_;      // 1 without groups
  const int64_t group_size_;  // experts per group
  int64_t count_;             // number of experts that a token may select: all, or those of its selected groups
  int64_t sets_;              // number of sets of parts that determine the bound (candidates.h)
  int64_t group_vectors_;     // elements per group, rounded up to whole chunks of a list
  int64_t all_groups_;        // groups, rounded up to whole chunks of a list
  int length_;                // length of the lists of ranked experts
  int group_length_;          // length of the lists of a group's group_score_topk best elements
  int selected_length_;       // length of the lists of the group_topk best groups
  size_t size_;

  float* bias_;         // [E], or null
  float* z_;            // [kLanes] rows of logits, used if they need conversion or padding
  float* s_;            // scores, for softmax before the division by their sum: one row, or [kLanes] rows
  int32_t* bins_;       // [kPlacedTokens] rows of bin indices
  float* q_;            // [kLanes] rows of selection keys, used if they are not z
  float* group_rows_;   // [kLanes] rows of the selection keys of the selected groups
  float* maxima_;       // [kLanes][sets * kRowPad]
  int32_t* all_;        // [count]: 0, 1, ...
  int32_t* places_;     // [count]: the index of the selected group of a position
  int32_t* positions_;  // positions of a lane's elements at or above its bound
  float* values_;       // the ranking values at these positions
  double* keys_;        // [kKeyLanes] rows of selection keys
  double* key_lanes_;   // [vectors][kKeyLanes]
  double* key_list_;    // [length][kKeyLanes]
  double* key_chunk_;
  float* number_lanes_;  // [vectors][kLanes], for values without keys
  float* number_list_;   // [length][kLanes]
  float* number_chunk_;
  double* group_keys_;        // [kLanes / kKeyLanes][all_groups][kKeyLanes]
  int32_t* selected_groups_;  // [group_topk][kLanes]
  int32_t* experts_;          // [K][kLanes]
  float* weights_;            // [K][kLanes]
  LaneSoftmax softmax_;
  const float* rows_[kLanes] = {};         // rows of logits
  const float* ranks_[kLanes] = {};        // the values that rank a lane's experts
  const float* group_ranks_[kLanes] = {};  // the values that rank its groups
  float factors_[kLanes] = {};             // factors of the rows of scores
  float bounds_[kLanes] = {};
  int64_t placed_ = 0;             // number of tokens in bins_
  float thresholds_[kLanes] = {};  // the best selection key that is not selected
  bool unmasked_[kLanes] = {};
};

void route(const RouterForward& op, int64_t begin, int64_t end, int32_t* counts, float* score_sum, int32_t* histogram,
           void* scratch) {
  for (int64_t e = 0; e < op.E; ++e) {
    if (counts != nullptr) counts[e] = 0;
    if (score_sum != nullptr) score_sum[e] = 0.0f;
  }
  Tile tile(op, scratch);
  for (int64_t t = begin; t < end; t += kLanes) {
    tile.route(t, static_cast<int>(end - t < kLanes ? end - t : kLanes), counts, score_sum, histogram);
  }
  if (histogram != nullptr) tile.count_bins(histogram);
}

size_t scratch_size(const RouterForward& op) { return Tile(op, nullptr).size(); }

}  // namespace

const RouterForwardKernels kRouterForward = {route, scratch_size};

}  // namespace anabranch::AB_ISA
