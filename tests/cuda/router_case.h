// A test case of the router: options, inputs (optionally with ties, infinities and NaN), and all possible outputs.
#pragma once

#include <cmath>
#include <limits>
#include <ostream>
#include <random>

#include "anabranch/router.h"
#include "float_tensor.h"
#include "support.h"

namespace anabranch::testing {
namespace {

enum class Form { compact, bytes, bits, int16, int32, int64, aux };

struct Case {
  int64_t T = 64;
  int64_t E = 64;
  int32_t K = 8;
  int32_t dtype = AB_FLOAT32;
  int32_t score_function = AB_SOFTMAX;
  int32_t normalize = 1;
  int32_t num_groups = 0;
  int32_t group_topk = 0;
  int32_t group_score_topk = 0;
  bool bias = false;
  bool mask = false;
  bool forced = false;
  bool specials = false;  // ties, infinities, NaN, -0
  int64_t sequences = 1;
  Form form = Form::compact;
  float scale = 2.0f;
  int64_t qb_bins = 0;     // bins of quantile balancing
  bool unaligned = false;  // every device tensor starts one element past an aligned address
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "T " << c.T << " E " << c.E << " K " << c.K << " dtype " << c.dtype << " score " << c.score_function
             << " normalize " << c.normalize << " groups " << c.num_groups << "/" << c.group_topk << " of "
             << c.group_score_topk << " bias " << c.bias << " mask " << c.mask << " forced " << c.forced << " specials "
             << c.specials << " sequences " << c.sequences << " form " << static_cast<int>(c.form) << " bins "
             << c.qb_bins << " unaligned " << c.unaligned;
}

struct Inputs {
  explicit Inputs(const Case& c, unsigned seed = 1)
      : logits({c.T, c.E}, c.dtype),
        bias({c.E}),
        mask({c.T}, AB_BOOL),
        forced({c.T, c.K}),
        bin_bounds({2}, {-0.75f, 1.0f}) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, c.scale);
    for (int64_t i = 0; i < logits.size(); ++i) logits.set(i, normal(random));
    for (int64_t e = 0; e < c.E; ++e) bias[e] = 0.05f * normal(random);
    for (int64_t t = 0; t < c.T; ++t) mask[t] = random() % 5 != 0;
    for (int64_t i = 0; i < forced.size(); ++i) {
      forced[i] = static_cast<int32_t>(random() % static_cast<unsigned>(c.E + 4)) - 2;
    }
    if (!c.specials) return;
    const float infinity = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < logits.size(); ++i) {
      switch (random() % 12) {
        case 0: logits.set(i, -infinity); break;
        case 1: logits.set(i, -0.0f); break;
        case 2: logits.set(i, 0.0f); break;
        case 3: logits.set(i, 1.0f); break;
        case 4: logits.set(i, std::round(logits.get(i))); break;
        default: break;
      }
      if (random() % 400 == 0) logits.set(i, infinity);
      if (random() % 400 == 0) logits.set(i, random() % 2 == 0 ? NAN : -NAN);
      if (random() % 50 == 0) logits.set(i, 1e-41f);
    }
  }
  FloatTensor logits;
  Tensor<float> bias;
  Tensor<uint8_t> mask;
  Tensor<int32_t> forced;
  Tensor<float> bin_bounds;
};

struct Outputs {
  explicit Outputs(const Case& c)
      : weights({c.T, c.K}),
        experts({c.T, c.K}),
        counts(c.sequences == 1 ? std::vector<int64_t>{c.E} : std::vector<int64_t>{c.sequences, c.E}),
        score_sum(c.sequences == 1 ? std::vector<int64_t>{c.E} : std::vector<int64_t>{c.sequences, c.E}),
        lse({c.T}),
        probs({c.T, c.E}, c.dtype),
        bytes({c.T, c.E}, AB_BOOL),
        bits({c.T, (c.E + 7) / 8}),
        i16({c.T, c.K}),
        i32({c.T, c.K}),
        i64({c.T, c.K}),
        aux({c.T, c.E}),
        histogram({c.E, c.qb_bins}) {}

  const ab_tensor* map(Form form) const {
    switch (form) {
      case Form::bytes: return bytes.view();
      case Form::bits: return bits.view();
      case Form::int16: return i16.view();
      case Form::int32: return i32.view();
      case Form::int64: return i64.view();
      default: return nullptr;
    }
  }

  Tensor<float> weights;
  Tensor<int32_t> experts;
  Tensor<int32_t> counts;
  Tensor<float> score_sum;
  Tensor<float> lse;
  FloatTensor probs;
  Tensor<uint8_t> bytes;
  Tensor<uint8_t> bits;
  Tensor<int16_t> i16;
  Tensor<int32_t> i32;
  Tensor<int64_t> i64;
  Tensor<float> aux;
  Tensor<int32_t> histogram;
};

}  // namespace
}  // namespace anabranch::testing
