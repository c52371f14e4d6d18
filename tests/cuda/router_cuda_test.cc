// The router on the GPU against the CPU, which other tests compare with the float64 oracle. Covers every output form,
// dtype, option and kernel variant. Outputs start as NaN and are between guard zones.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "router_run.h"

namespace anabranch::testing {
namespace {

template <class Got, class Want>
double relative_error(int64_t size, const Got& got, const Want& want) {
  double error = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < size; ++i) {
    const double g = got(i);
    const double w = want(i);
    if (!std::isfinite(w) || !std::isfinite(g)) {
      const bool same = (std::isnan(g) && std::isnan(w)) || g == w;
      if (!same) return std::numeric_limits<double>::infinity();
      continue;
    }
    error += (g - w) * (g - w);
    norm += w * w;
  }
  return norm == 0.0 ? (error == 0.0 ? 0.0 : std::numeric_limits<double>::infinity()) : std::sqrt(error / norm);
}

// Each backend has an error of 2e-6, and more where exponentials of a wide range are added.
constexpr double kBound = 5e-6;
double rounding(int32_t dtype) { return dtype == AB_FLOAT32 ? 0.0 : dtype == AB_BFLOAT16 ? 0x1p-8 : 0x1p-10; }

// Each backend rounds before it counts, so a few scores fall into a neighbouring bin. Sums the differences of the
// cumulative counts, which is the number of bins that scores moved.
void compare_histograms(const Case& c, const Outputs& got, const Outputs& want) {
  int64_t moved = 0;
  int64_t counted = 0;
  for (int64_t e = 0; e < c.E; ++e) {
    int64_t difference = 0;
    for (int64_t bin = 0; bin < c.qb_bins; ++bin) {
      difference += got.histogram[e * c.qb_bins + bin] - want.histogram[e * c.qb_bins + bin];
      counted += want.histogram[e * c.qb_bins + bin];
      moved += std::abs(difference);
    }
    ASSERT_EQ(difference, 0) << "qb_histogram of expert " << e;
  }
  ASSERT_LE(static_cast<double>(moved), 2.0 + 1e-3 * static_cast<double>(counted)) << "qb_histogram";
}

// Selections are exact without a bias and groups. With them, few tokens may differ, where keys nearly tie.
void compare(const Case& c, const Outputs& got, const Outputs& want) {
  const bool computed = c.bias || c.num_groups > 0;
  std::vector<bool> same(static_cast<size_t>(c.T), true);
  int64_t different = 0;
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t k = 0; k < c.K; ++k) {
      if (got.experts[t * c.K + k] != want.experts[t * c.K + k]) same[static_cast<size_t>(t)] = false;
    }
    different += !same[static_cast<size_t>(t)];
  }
  ASSERT_LE(different, computed ? 1 + c.T / 50 : 0) << "experts differ";
  compare_histograms(c, got, want);
  if (::testing::Test::HasFatalFailure()) return;

  std::vector<int32_t> counts(got.counts.values().size(), 0);
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t sequence = t / (c.T / c.sequences);
    for (int64_t k = 0; k < c.K; ++k) {
      const int32_t e = got.experts[t * c.K + k];
      if (e >= 0) ++counts[static_cast<size_t>(sequence * c.E + e)];
    }
  }
  ASSERT_EQ(counts, got.counts.values()) << "tokens_per_expert";

  const auto is_same = [&](int64_t t) { return static_cast<bool>(same[static_cast<size_t>(t)]); };
  const auto check = [&](const char* name, int64_t columns, const auto& g, const auto& w, double bound) {
    const double error = relative_error(
        c.T * columns, [&](int64_t i) { return is_same(i / columns) ? static_cast<double>(g(i)) : 0.0; },
        [&](int64_t i) { return is_same(i / columns) ? static_cast<double>(w(i)) : 0.0; });
    ASSERT_LE(error, bound) << name;
  };
  for (int64_t t = 0; t < c.T; ++t) {
    const double g = got.lse[t];
    const double w = want.lse[t];
    const bool both = (std::isnan(g) && std::isnan(w)) || g == w || std::abs(g - w) <= kBound * (1 + std::abs(w));
    ASSERT_TRUE(both) << "lse of token " << t << ": " << g << " and " << w;
  }
  if (c.form == Form::aux || c.form == Form::compact) {
    check(
        "weights", c.K, [&](int64_t i) { return got.weights[i]; }, [&](int64_t i) { return want.weights[i]; }, kBound);
  }
  if (c.form == Form::aux) {
    check("aux_scores", c.E, [&](int64_t i) { return got.aux[i]; }, [&](int64_t i) { return want.aux[i]; }, kBound);
    return;
  }
  for (int64_t i = 0; i < got.score_sum.size(); ++i) {
    const double g = got.score_sum[i];
    const double w = want.score_sum[i];
    const bool both = (std::isnan(g) && std::isnan(w)) || std::abs(g - w) <= 2 * kBound * std::abs(w) + 1e-30;
    ASSERT_TRUE(both) << "score_sum[" << i << "]: " << g << " and " << w;
  }
  if (c.form == Form::compact) return;
  check(
      "probs", c.E, [&](int64_t i) { return got.probs.get(i); }, [&](int64_t i) { return want.probs.get(i); },
      kBound + rounding(c.dtype));
  const auto exact = [&](const char* name, int64_t columns, const auto& g, const auto& w) {
    for (int64_t i = 0; i < c.T * columns; ++i) {
      ASSERT_TRUE(!is_same(i / columns) || g[i] == w[i]) << name << " at " << i;
    }
  };
  if (c.form == Form::bytes) exact("byte map", c.E, got.bytes, want.bytes);
  if (c.form == Form::bits) exact("bit map", (c.E + 7) / 8, got.bits, want.bits);
  if (c.form == Form::int16) exact("int16", c.K, got.i16, want.i16);
  if (c.form == Form::int32) exact("int32", c.K, got.i32, want.i32);
  if (c.form == Form::int64) exact("int64", c.K, got.i64, want.i64);
}

// Computes, in float64, the norm of the terms s_e (|G_e| + sum |G| s) of the gradient of auxiliary scores s under
// cotangents G. Where the terms nearly cancel, both backends keep the rounding error of the terms.
template <class CotangentOf>
double auxiliary_terms(const Case& c, const Inputs& in, const CotangentOf& cotangent_of) {
  double squares = 0.0;
  std::vector<double> s(static_cast<size_t>(c.E));
  for (int64_t t = 0; t < c.T; ++t) {
    double top = -std::numeric_limits<double>::infinity();
    for (int64_t e = 0; e < c.E; ++e) top = std::max<double>(top, in.logits.get(t * c.E + e));
    double sum = 0.0;
    double dot = 0.0;
    for (int64_t e = 0; e < c.E; ++e) {
      const double z = in.logits.get(t * c.E + e);
      const double score = c.score_function == AB_SOFTMAX ? std::exp(z - top)
                           : c.score_function == AB_SIGMOID
                               ? 1.0 / (1.0 + std::exp(-z))
                               : std::sqrt(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
      s[static_cast<size_t>(e)] = score;
      sum += score;
      dot += score * std::abs(cotangent_of(t, e));
    }
    for (int64_t e = 0; e < c.E; ++e) {
      const double term = s[static_cast<size_t>(e)] / sum * (std::abs(cotangent_of(t, e)) + dot / sum);
      if (std::isfinite(term)) squares += term * term;
    }
  }
  return std::sqrt(squares);
}

// Selects which of the 6 cotangents to test: first, first + step, ...
struct Cotangents {
  int first = 0;
  int step = 1;
};

// Compares the gradients of both backends for the selection in `out`.
void compare_gradients(const Case& c, const Inputs& in, const Outputs& out, unsigned seed, Cotangents cotangents) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](Tensor<float>& tensor) {
    for (float& value : tensor.values()) value = normal(random);
  };
  Tensor<float> d_weights({c.T, c.K});
  FloatTensor d_probs({c.T, c.E}, c.dtype);
  Tensor<float> d_score_sum(c.sequences == 1 ? std::vector<int64_t>{c.E} : std::vector<int64_t>{c.sequences, c.E});
  Tensor<float> d_aux({c.T, c.E});
  Tensor<float> d_lse({c.T});
  fill(d_weights);
  fill(d_score_sum);
  fill(d_lse);
  for (int which = cotangents.first; which < 6; which += cotangents.step) {
    if (which == 1) d_probs.fill_normal(seed);
    if (which == 3) fill(d_aux);
    ab_router_backward_args args = backward_args(c, in, out);
    const bool is_softmax = c.score_function == AB_SOFTMAX;
    if (which == 0 || which == 5) args.d_weights = d_weights.view();
    if (which == 1) args.d_probs = d_probs.view();
    if (which == 2 || which == 5) args.d_score_sum = d_score_sum.view();
    if (which == 3) args.d_aux_scores = d_aux.view();
    if (which == 4 || which == 5) args.d_lse = d_lse.view();
    const bool weighted = args.d_weights != nullptr || args.d_probs != nullptr;
    if (!weighted) args.experts = nullptr;
    if (!weighted) args.scaling_factor = 1.0f;
    if (seed % 2 == 0 && (args.d_lse != nullptr || is_softmax)) args.lse = out.lse.view();
    FloatTensor want({c.T, c.E}, c.dtype);
    FloatTensor got({c.T, c.E}, c.dtype);
    args.d_logits = want.view();
    EXPECT_OK(call(ab_router_backward, ab_router_backward_workspace, args));
    args.d_logits = got.view();
    const auto run_backward = [&] {
      Mirrors mirrors;
      const ab_router_backward_args there = on_device(args, add_to(&mirrors, c.unaligned));
      EXPECT_OK(ab_cuda_router_backward(&there, nullptr));
      mirrors.fetch();
    };
    run_backward();
    const double error =
        relative_error(got.size(), [&](int64_t i) { return got.get(i); }, [&](int64_t i) { return want.get(i); });
    if (c.dtype == AB_FLOAT32) {
      const int32_t dtype = which % 2 == 0 ? AB_BFLOAT16 : AB_FLOAT16;
      FloatTensor rounded({c.T, c.E}, dtype);
      args.d_logits = rounded.view();
      run_backward();
      FloatTensor once({c.T, c.E}, dtype);
      for (int64_t i = 0; i < got.size(); ++i) {
        once.set(i, got.get(i));
        ASSERT_TRUE(rounded.get(i) == once.get(i) || (std::isnan(rounded.get(i)) && std::isnan(once.get(i))))
            << "d_logits rounded, cotangent " << which << ", element " << i;
      }
    }
    double largest = 0.0;
    for (int64_t i = 0; i < want.size(); ++i) largest = std::max<double>(largest, std::abs(want.get(i)));
    if (largest < kBound) {  // the gradient is zero except for rounding
      for (int64_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(std::abs(got.get(i) - want.get(i)) <= kBound ||
                    (std::isnan(got.get(i)) && std::isnan(want.get(i))));
      }
      continue;
    }
    double terms = 0.0;
    if (which == 2 || which == 3 || which == 5) {
      terms = auxiliary_terms(c, in, [&](int64_t t, int64_t e) -> double {
        return which == 3 ? d_aux[t * c.E + e] : d_score_sum[t / (c.T / c.sequences) * c.E + e];
      });
    }
    double norm = 0.0;
    for (int64_t i = 0; i < want.size(); ++i)
      norm += std::isfinite(want.get(i)) ? double{want.get(i)} * want.get(i) : 0.0;
    // float16 denormals are multiples of 2^-24.
    const double spacing = c.dtype == AB_FLOAT16 ? 0x1p-24 * std::sqrt(static_cast<double>(want.size())) : 0.0;
    ASSERT_LE(error, 2 * kBound + rounding(c.dtype) + (1e-6 * terms + spacing) / std::sqrt(norm))
        << "d_logits of cotangent " << which;
  }
}

void check(const Case& c, unsigned seed = 1, Cotangents cotangents = {}) {
  SCOPED_TRACE(::testing::Message() << c);
  const Inputs in(c, seed);
  const Outputs want(c);
  EXPECT_OK(call(ab_router_forward, ab_router_forward_workspace, forward_args(c, in, want)));
  const Outputs got(c);
  run_on_device(c, in, got);
  if (::testing::Test::HasFatalFailure()) return;
  compare(c, got, want);
  if (::testing::Test::HasFatalFailure()) return;
  const Outputs again(c);
  run_on_device(c, in, again);
  const auto same_bits = [](const auto& a, const auto& b) {
    return std::memcmp(a.values().data(), b.values().data(), a.values().size() * sizeof(a.values()[0])) == 0;
  };
  ASSERT_TRUE(same_bits(got.experts, again.experts) && got.histogram.values() == again.histogram.values() &&
              same_bits(got.weights, again.weights) && same_bits(got.score_sum, again.score_sum) &&
              same_bits(got.lse, again.lse))
      << "a second run gave other bits";
  compare_gradients(c, in, got, seed, cotangents);
}

class RouterCuda : public CudaTest {};

TEST_F(RouterCuda, EveryWidth) {
  unsigned seed = 0;
  for (const int64_t E :
       {1, 3, 8, 9, 16, 32, 33, 64, 72, 96, 128, 130, 160, 192, 256, 384, 512, 768, 1000, 1024, 1032, 2304}) {
    for (const int64_t T : {1, 7, 200, 2500}) {
      if (T == 2500 && E > 600) continue;
      for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
        Case c{T, E, static_cast<int32_t>(std::min<int64_t>(E, 1 + ++seed % 10)), dtype};
        c.score_function = static_cast<int32_t>(seed % 3);
        c.normalize = static_cast<int32_t>(seed / 3 % 2);
        c.bias = seed % 4 == 1;
        c.mask = seed % 5 == 2;
        c.form = static_cast<Form>(seed % 7);
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Tests every compiled row width with every length of the top-k list, full and not full, and replays. Most of the time
// goes into random inputs and comparisons on the host. The backward kernel is the same for full and partial lists, so
// each is tested with half of the cotangents.
void check_variants(int64_t T, unsigned seed) {
  for (const int64_t E : {8, 16, 32, 64, 128, 256, 384, 512, 1000}) {
    for (const int32_t list : {4, 8, 16, 32, 64}) {
      if (list > 8 && E <= list / 2) continue;        // same kernel as for the previous list
      if (list == 4 && E > 32 && E != 128) continue;  // same kernel as for the next list
      for (int mode = 0; mode < 3; ++mode) {
        for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
          for (const bool full : {false, true}) {
            ++seed;
            const auto K =
                static_cast<int32_t>(std::min<int64_t>(E, full ? list : list - 1 - static_cast<int>(seed / 2 % 2)));
            Case c{T, E, K, dtype};
            const auto score_functions = static_cast<int32_t>(seed / 3 % 3);
            c.score_function = mode == 0 ? AB_SOFTMAX : mode == 1 ? 1 + score_functions % 2 : score_functions;
            c.bias = mode == 2;
            c.normalize = static_cast<int32_t>(seed / 2 % 2);
            c.form = static_cast<Form>(seed % 7);
            c.mask = seed % 5 == 0;
            check(c, seed,
                  {static_cast<int>(seed / 2 % 2), 2});  // seed % 2 equals `full` and decides whether lse is passed
            if (seed % 11 == 0 && !c.bias) {
              c.forced = true;
              c.form = Form::compact;  // the only form of a replay
              check(c, seed);
            }
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
  for (const int64_t E : {128, 256, 512}) {
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      for (const bool bias : {false, true}) {
        Case c{T, E, 8, dtype, ++seed % 2 == 0 ? AB_SOFTMAX : AB_SIGMOID};
        c.num_groups = 8;
        c.group_topk = 4;
        c.bias = bias;
        c.form = static_cast<Form>(seed % 7);
        check(c, seed);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}
TEST_F(RouterCuda, EveryVariantForFewTokens) { check_variants(300, 500); }
TEST_F(RouterCuda, EveryVariantForManyTokens) { check_variants(2100, 2500); }

TEST_F(RouterCuda, ManyExperts) {
  unsigned seed = 600;
  for (const int64_t E : {4096, 8192}) {
    for (const int32_t K : {8, 100, 4096}) {
      for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
        if (K == 4096 && E == 8192) continue;
        Case c{K == 4096 ? 9 : 150, E, K, dtype, static_cast<int32_t>(++seed % 3)};
        c.bias = seed % 2 == 0;
        c.form = static_cast<Form>(seed % 7);
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouterCuda, UnalignedTensors) {
  unsigned seed = 700;
  for (const int64_t E : {8, 32, 64, 128, 256, 384, 512, 1000, 2304}) {
    for (const int64_t T : {6, 90, 2500}) {
      if (T == 2500 && E > 600) continue;
      for (const Form form :
           {Form::compact, Form::bytes, Form::bits, Form::int16, Form::int32, Form::int64, Form::aux}) {
        Case c{T, E, 8, ++seed % 3 == 0 ? AB_FLOAT32 : seed % 3 == 1 ? AB_BFLOAT16 : AB_FLOAT16};
        c.score_function = static_cast<int32_t>(seed / 3 % 3);
        c.bias = seed % 5 == 0;
        c.mask = seed % 4 == 0;
        c.form = form;
        c.unaligned = true;
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouterCuda, EveryOption) {
  unsigned seed = 100;
  for (const int32_t score_function : {AB_SOFTMAX, AB_SIGMOID, AB_SQRTSOFTPLUS}) {
    for (const int32_t normalize : {0, 1}) {
      for (const bool bias : {false, true}) {
        for (const int groups : {0, 4, 8}) {
          for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
            for (const int64_t E : {64, 128, 256}) {
              Case c{300, E, E == 128 ? 4 : 8, dtype, score_function, normalize};
              c.num_groups = groups;
              c.group_topk = groups / 2 * (groups == 4 ? 2 : 1);
              c.bias = bias;
              c.mask = seed % 2 == 0;
              c.form = static_cast<Form>(++seed % 7);
              c.T = E == 64 ? 300 : 2200;
              check(c, seed);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST_F(RouterCuda, ScoresOfGroupsOfSomeExperts) {
  unsigned seed = 800;
  struct Grouping {
    int64_t E;
    int32_t K, num_groups, group_topk;
  };
  for (const Grouping& g : {Grouping{128, 8, 8, 4},
                            {256, 8, 8, 4},
                            {256, 6, 8, 3},
                            {256, 5, 4, 3},
                            {60, 4, 6, 2},
                            {512, 20, 16, 7},
                            {1200, 8, 8, 4}}) {
    for (const int32_t score_topk : {1, 2, 3, static_cast<int32_t>(g.E / g.num_groups)}) {
      for (const bool bias : {false, true}) {
        for (const int64_t T : {300, 2100}) {
          if (T > 300 && g.E > 600) continue;
          Case c{T, g.E, g.K, ++seed % 2 == 0 ? AB_FLOAT32 : AB_BFLOAT16, static_cast<int32_t>(seed / 2 % 3)};
          c.normalize = static_cast<int32_t>(seed / 4 % 2);
          c.num_groups = g.num_groups;
          c.group_topk = g.group_topk;
          c.group_score_topk = score_topk;
          c.bias = bias;
          c.mask = seed % 5 == 0;
          c.specials = seed % 7 == 0 && !bias;
          c.form = static_cast<Form>(seed % 7);
          check(c, seed, {static_cast<int>(seed % 2), 2});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(RouterCuda, EveryTopk) {
  unsigned seed = 200;
  for (const int64_t E : {8, 64, 512, 1100}) {
    for (const int32_t K : {1, 2, 7, 8, 9, 16, 17, 32, 36, 64, 65, 200, 512}) {
      if (K > E) continue;
      Case c{40, E, K, ++seed % 2 == 0 ? AB_FLOAT32 : AB_BFLOAT16};
      c.score_function = static_cast<int32_t>(seed % 3);
      c.bias = seed % 4 == 0;
      c.form = static_cast<Form>(seed % 7);
      check(c, seed);
      if (HasFatalFailure()) return;
    }
    Case c{40, E, static_cast<int32_t>(E)};
    check(c);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RouterCuda, TiesInfinitiesAndNan) {
  unsigned seed = 300;
  for (const int64_t E : {8, 40, 128, 256, 1100}) {
    for (const int32_t score_function : {AB_SOFTMAX, AB_SIGMOID, AB_SQRTSOFTPLUS}) {
      for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
        for (const int64_t T : {60, 2100}) {
          if (T > 100 && E > 256) continue;
          Case c{T, E, 4, dtype, score_function, static_cast<int32_t>(++seed % 2)};
          c.specials = true;
          c.form = static_cast<Form>(seed % 7);
          c.scale = seed % 3 == 0 ? 40.0f : 1.0f;
          check(c, seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(RouterCuda, ReplayMasksAndSequences) {
  unsigned seed = 400;
  for (const int64_t E : {3, 64, 384, 1500}) {
    for (const bool forced : {false, true}) {
      for (const int64_t sequences : {1, 3, 600}) {
        Case c{600, E, 3, ++seed % 2 == 0 ? AB_FLOAT32 : AB_BFLOAT16};
        c.score_function = static_cast<int32_t>(seed % 3);
        c.forced = forced;
        c.mask = true;
        c.sequences = sequences;
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouterCuda, ThresholdsOfEveryVariant) {
  unsigned seed = 1000;
  for (const int64_t E : {2, 8, 32, 60, 128, 256, 384, 512, 1000, 1100}) {
    for (const int32_t list : {1, 7, 8, 9, 16, 32, 64, 100}) {
      const auto K = static_cast<int32_t>(std::min<int64_t>(list, E - 1));
      if (K < list && list != 100) continue;
      for (const int64_t T : {70, 2100}) {
        if (T == 2100 && E > 512) continue;
        Case c{T, E, K, ++seed % 3 == 0 ? AB_FLOAT32 : seed % 3 == 1 ? AB_BFLOAT16 : AB_FLOAT16};
        c.score_function = static_cast<int32_t>(seed / 3 % 3);
        c.normalize = static_cast<int32_t>(seed / 2 % 2);
        c.bias = true;
        c.mask = seed % 4 == 0;
        c.specials = seed % 6 == 0;
        c.form = static_cast<Form>(seed % 7);
        c.unaligned = seed % 5 == 0;
        c.qb_bins = seed % 2 == 0 ? 1000 : 37;
        check(c, seed, {6, 1});  // no cotangents: gradients do not depend on the histogram
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouterCuda, ThresholdsWithAnyNumberOfBins) {
  unsigned seed = 1200;
  for (const int64_t bins :
       {1, 2, 32, 53247, 53249, 200000}) {  // rows that fit into shared memory and rows that do not
    for (const int64_t T : {1, 63, 65, 3000}) {
      Case c{T, 20, 3, ++seed % 2 == 0 ? AB_FLOAT32 : AB_BFLOAT16, AB_SIGMOID};
      c.bias = true;
      c.qb_bins = bins;
      // With more bins, rounding moves a position by more than a thousandth of a bin.
      if (bins < 1000) {
        check(c, seed, {6, 1});
      } else {
        const Inputs in(c, seed);
        const Outputs got(c);
        run_on_device(c, in, got);
        int64_t counted = 0;
        for (const int32_t count : got.histogram.values()) counted += count;
        ASSERT_EQ(counted, T * c.E);
      }
      if (HasFatalFailure()) return;
    }
  }
}

// Gradients of dense probabilities for one selection in every form, with some indices out of range.
TEST_F(RouterCuda, SelectionsInEveryForm) {
  unsigned seed = 900;
  for (const int64_t E : {8, 40, 256, 1100}) {
    for (const int32_t K : {1, 8, 70}) {
      if (K > E) continue;
      Case c{150, E, K, ++seed % 2 == 0 ? AB_FLOAT32 : AB_BFLOAT16, static_cast<int32_t>(seed % 3)};
      c.normalize = static_cast<int32_t>(seed / 3 % 2);
      c.mask = true;
      const Inputs in(c, seed);
      const Outputs out(c);
      for (const Form form : {Form::bytes, Form::bits, Form::int16, Form::int64}) {
        c.form = form;
        EXPECT_OK(call(ab_router_forward, ab_router_forward_workspace, forward_args(c, in, out)));
      }
      Tensor<int64_t> wild({c.T, c.K}, out.i64.values());
      for (int64_t i = 3; i < wild.size(); i += 7) wild[i] = i % 2 == 0 ? (int64_t{1} << 32) + 1 : -5;
      Tensor<uint8_t> full({c.T, c.E}, AB_BOOL);  // a map with more than K experts per token
      for (int64_t i = 0; i < full.size(); ++i) full[i] = i % 3 != 0;
      FloatTensor d_probs({c.T, c.E}, c.dtype);
      d_probs.fill_normal(seed);
      for (const ab_tensor* form :
           {out.bytes.view(), out.bits.view(), out.i16.view(), out.i64.view(), wild.view(), full.view()}) {
        FloatTensor want({c.T, c.E}, c.dtype);
        FloatTensor got({c.T, c.E}, c.dtype);
        ab_router_backward_args args = backward_args(c, in, out);
        const bool is_map = form->dtype == AB_BOOL || form->dtype == AB_UINT8;
        args.experts = is_map ? nullptr : form;
        args.routing_map = is_map ? form : nullptr;
        args.d_probs = d_probs.view();
        args.d_logits = want.view();
        EXPECT_OK(call(ab_router_backward, ab_router_backward_workspace, args));
        args.d_logits = got.view();
        using Args = ab_router_backward_args;
        run_on_copies(ab_cuda_router_backward_workspace, ab_cuda_router_backward, args, &Args::logits, &Args::experts,
                      &Args::token_mask, &Args::d_probs, &Args::d_logits, &Args::routing_map);
        const double error =
            relative_error(got.size(), [&](int64_t i) { return got.get(i); }, [&](int64_t i) { return want.get(i); });
        double largest = 0.0;
        for (int64_t i = 0; i < want.size(); ++i) largest = std::max<double>(largest, std::abs(want.get(i)));
        if (largest < kBound) continue;  // a single expert: the gradient is zero except for rounding
        ASSERT_LE(error, 2 * kBound + rounding(c.dtype)) << c << " selection of dtype " << form->dtype;
      }
    }
  }
}

TEST_F(RouterCuda, NoTokens) {
  Case c{0, 64, 8};
  const Inputs in(c);
  const Outputs got(c);
  run_on_device(c, in, got);
  for (int64_t e = 0; e < c.E; ++e) {
    EXPECT_EQ(got.counts[e], 0);
    EXPECT_EQ(got.score_sum[e], 0.0f);
  }
}

TEST_F(RouterCuda, BadArgumentsAreRefused) {
  Case c{8, 64, 8};
  const Inputs in(c);
  const Outputs out(c);
  Mirrors mirrors;
  ab_router_forward_args args = on_device(forward_args(c, in, out), add_to(&mirrors));
  args.topk = 65;
  EXPECT_REFUSED(ab_cuda_router_forward(&args, nullptr), AB_INVALID_ARGUMENT, "topk: got 65");
  const Tensor<float> logits({1, 16384});
  ab_router_forward_args too_many_experts{};
  too_many_experts.size = sizeof(too_many_experts);
  too_many_experts.topk = 8;
  too_many_experts.normalize = 1;
  too_many_experts.scaling_factor = 1.0f;
  too_many_experts.logits = logits.view();
  const Tensor<float> lse({1});
  too_many_experts.lse = lse.view();
  EXPECT_REFUSED(ab_cuda_router_forward(&too_many_experts, nullptr), AB_UNSUPPORTED, "16384 experts");
  Case many{4096, 64, 8};
  const Inputs many_inputs(many);
  const Outputs many_outputs(many);
  args = on_device(forward_args(many, many_inputs, many_outputs), add_to(&mirrors));
  EXPECT_REFUSED(ab_cuda_router_forward(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
}

TEST_F(RouterCuda, ReplaysInAGraph) {
  Case c{4096, 128, 8, AB_BFLOAT16};
  const Inputs in(c);
  const Outputs direct(c);
  run_on_device(c, in, direct);
  const Outputs replayed(c);
  Mirrors mirrors;
  const ab_router_forward_args args = on_device(forward_args(c, in, replayed), add_to(&mirrors));
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_router_forward_workspace(&args, nullptr, &bytes));
  DeviceWorkspace workspace(bytes);
  replay_in_graph([&](cudaStream_t stream) {
    workspace.exec().stream = stream;
    EXPECT_OK(ab_cuda_router_forward(&args, &workspace.exec()));
  });
  mirrors.fetch();
  EXPECT_EQ(replayed.experts.values(), direct.experts.values());
  EXPECT_EQ(replayed.counts.values(), direct.counts.values());
  EXPECT_EQ(std::memcmp(replayed.score_sum.values().data(), direct.score_sum.values().data(), 4 * 128), 0);
}

}  // namespace
}  // namespace anabranch::testing
