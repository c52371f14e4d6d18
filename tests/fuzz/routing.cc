#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "values.h"

namespace anabranch::fuzz {
namespace {

using Row = std::vector<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double at(const ab_tensor* tensor, int64_t i) {
  const auto size = static_cast<int64_t>(element_size(tensor->dtype));
  return value_of(static_cast<const char*>(tensor->data) + i * size, tensor->dtype);
}

double softplus(double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))); }

// Computes the scores of a row of logits.
Row scores_of(const Row& z, int32_t score_function) {
  Row s(z.size());
  const double top = *std::max_element(z.begin(), z.end());
  double sum = 0.0;
  for (const double x : z) sum += std::exp(x - top);
  for (size_t e = 0; e < z.size(); ++e) {
    s[e] = score_function == AB_SOFTMAX   ? std::exp(z[e] - top) / sum
           : score_function == AB_SIGMOID ? 1.0 / (1.0 + std::exp(-z[e]))
                                          : std::sqrt(softplus(z[e]));
  }
  return s;
}

// Descending order; NaN comes before all numbers.
bool precedes(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

class Selection {
 public:
  explicit Selection(const ab_router_forward_args& args)
      : args_(args),
        E_(args.logits->shape[1]),
        group_score_topk_(args.num_groups == 0         ? 0
                          : args.group_score_topk == 0 ? args.topk / args.group_topk
                                                       : args.group_score_topk) {}

  bool by_score() const { return args_.expert_bias != nullptr; }
  bool groups_by_score() const {
    return by_score() || args_.group_score_topk > 0 || args_.normalize == 0 || args_.score_function != AB_SOFTMAX;
  }
  bool is_masked(int64_t t) const { return args_.token_mask != nullptr && at(args_.token_mask, t) == 0.0; }

  // Reads the logits of token t and computes its scores, with and without bias.
  void read(int64_t t) {
    z_.resize(static_cast<size_t>(E_));
    for (int64_t e = 0; e < E_; ++e) z_[static_cast<size_t>(e)] = at(args_.logits, t * E_ + e);
    scores_ = scores_of(z_, args_.score_function);
    biased_ = scores_;
    for (int64_t e = 0; e < E_; ++e) {
      double& q = biased_[static_cast<size_t>(e)];
      if (by_score()) q += at(args_.expert_bias, e);
      if (z_[static_cast<size_t>(e)] == -kInfinity) q = -kInfinity;
    }
  }
  const Row& scores() const { return scores_; }
  const Row& keys() const { return by_score() ? biased_ : z_; }

  // Returns the rounding error of one key.
  double rounding() const {
    double largest = 1.0;
    for (const double q : biased_) largest = std::isfinite(q) ? std::max(largest, std::abs(q)) : largest;
    return (args_.score_function == AB_SOFTMAX ? 32 : 4) * 0x1p-23 * largest;
  }

  // Whether rounding may change the selected groups, or the experts selected from them.
  bool is_open() const {
    std::vector<bool> selected(static_cast<size_t>(E_), true);
    if (args_.num_groups > 0 && choose_groups(&selected)) return true;
    if (!by_score()) return false;
    Row candidates;
    for (size_t e = 0; e < keys().size(); ++e) {
      if (selected[e]) candidates.push_back(keys()[e]);
    }
    return is_close(candidates, args_.topk, rounding());
  }

  double threshold() const {
    Row sorted = keys();
    std::sort(sorted.begin(), sorted.end(), precedes);
    return sorted[static_cast<size_t>(args_.topk)];
  }

 private:
  // Whether two neighbours among the top count + 1 keys differ by less than `rounding` but are not equal.
  static bool is_close(Row keys, int32_t count, double rounding) {
    std::sort(keys.begin(), keys.end(), precedes);
    for (size_t i = 0; i < static_cast<size_t>(count) && i + 1 < keys.size(); ++i) {
      if (keys[i] != keys[i + 1] && std::abs(keys[i] - keys[i + 1]) <= rounding) return true;
    }
    return false;
  }

  // Clears selected[e] if the group of expert e is not selected. Returns whether rounding may change the groups.
  bool choose_groups(std::vector<bool>* selected) const {
    const Row& keys = groups_by_score() ? biased_ : z_;
    const auto size = static_cast<size_t>(E_ / args_.num_groups);
    struct Group {
      size_t index;
      double score;
      Row best;
    };
    std::vector<Group> groups;
    for (size_t g = 0; g < static_cast<size_t>(args_.num_groups); ++g) {
      Row best(keys.begin() + static_cast<std::ptrdiff_t>(g * size),
               keys.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
      std::sort(best.begin(), best.end(), precedes);
      best.resize(static_cast<size_t>(group_score_topk_));
      double score = 0.0;
      for (const double q : best) score += q;
      groups.push_back({g, score, best});
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const Group& a, const Group& b) { return precedes(a.score, b.score); });
    for (size_t g = static_cast<size_t>(args_.group_topk); g < groups.size(); ++g) {
      for (size_t e = 0; e < size; ++e) (*selected)[groups[g].index * size + e] = false;
    }
    const Group& last = groups[static_cast<size_t>(args_.group_topk) - 1];
    const double rounding_of_sum = rounding() * group_score_topk_ * group_score_topk_;
    return std::any_of(groups.begin(), groups.end(), [&](const Group& other) {
      return other.best != last.best && std::abs(other.score - last.score) <= rounding_of_sum;
    });
  }

  const ab_router_forward_args& args_;
  int64_t E_;
  int32_t group_score_topk_;
  Row z_;
  Row scores_;
  Row biased_;
};

}  // namespace

bool selection_is_open(const ab_router_forward_args& args) {
  if (args.forced_experts != nullptr) return false;
  Selection selection(args);
  if (!selection.by_score() && args.num_groups == 0) return false;
  for (int64_t t = 0; t < args.logits->shape[0]; ++t) {
    if (selection.is_masked(t)) continue;
    selection.read(t);
    if (selection.is_open()) return true;
  }
  return false;
}

void fill_lse(const Operand& logits, char* lse) {
  ab_tensor view = logits.view;
  view.data = const_cast<char*>(logits.content.data());
  const int64_t E = view.shape[1];
  for (int64_t t = 0; t < view.shape[0]; ++t) {
    Row row;
    for (int64_t e = 0; e < E; ++e) row.push_back(at(&view, t * E + e));
    double top = -kInfinity;
    for (const double z : row) top = std::isnan(z) ? top : std::max(top, z);
    double sum = 0.0;  // NaN if a logit is NaN, one is +inf, or all are infinite
    for (const double z : row) sum += std::exp(z - top);
    const auto value = static_cast<float>(top + std::log(sum));
    std::memcpy(lse + static_cast<size_t>(t) * sizeof(value), &value, sizeof(value));
  }
}

std::string histogram_fault(const ab_router_forward_args& args, const char* histogram) {
  const double lower = at(args.qb_bin_bounds, 0);
  const double upper = at(args.qb_bin_bounds, 1);
  if (!(lower < upper) || !std::isfinite(upper - lower)) return "";  // the contract does not define the counts then
  const int64_t E = args.logits->shape[1];
  const int64_t bins = args.qb_histogram->shape[1];
  // Bounds of the number of tokens below the upper edge of each bin, per expert.
  std::vector<int64_t> min_below(static_cast<size_t>(E * bins), 0);
  std::vector<int64_t> max_below(static_cast<size_t>(E * bins), 0);
  Selection selection(args);
  for (int64_t t = 0; t < args.logits->shape[0]; ++t) {
    if (selection.is_masked(t)) continue;
    selection.read(t);
    const double per_unit = static_cast<double>(bins) / (upper - lower);
    const double threshold = selection.threshold();
    for (int64_t e = 0; e < E; ++e) {
      const double position = (threshold - selection.scores()[static_cast<size_t>(e)] - lower) * per_unit;
      if (std::isnan(position)) continue;
      const double rounding =
          4 * per_unit * (selection.rounding() + 0x1p-23 * std::max(std::abs(lower), std::abs(upper)));
      for (int64_t bin = 0; bin < bins; ++bin) {
        const bool is_last = bin == bins - 1;
        const auto edge = static_cast<double>(bin + 1);
        min_below[static_cast<size_t>(e * bins + bin)] += is_last || position < edge - rounding ? 1 : 0;
        max_below[static_cast<size_t>(e * bins + bin)] += is_last || position < edge + rounding ? 1 : 0;
      }
    }
  }
  for (int64_t e = 0; e < E; ++e) {
    int64_t below = 0;
    for (int64_t bin = 0; bin < bins; ++bin) {
      const auto i = static_cast<size_t>(e * bins + bin);
      below += read<int32_t>(histogram + i * sizeof(int32_t));
      if (below >= min_below[i] && below <= max_below[i]) continue;
      return ", expert " + std::to_string(e) + ": " + std::to_string(below) + " tokens in the bins up to " +
             std::to_string(bin) + ", expected " + std::to_string(min_below[i]) + " to " + std::to_string(max_below[i]);
    }
  }
  return "";
}

}  // namespace anabranch::fuzz
