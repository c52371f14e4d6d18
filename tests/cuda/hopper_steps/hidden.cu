// Products with an epilogue of their own, against sums and activations in double precision.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "anabranch/experts.h"
#include "experts/cuda/clear_padding.h"
#include "experts/hopper/products.h"
#include "steps.h"

namespace anabranch::steps {
namespace {

using namespace anabranch::cuda;
using namespace anabranch::cuda::hopper;

struct Case {
  std::vector<int32_t> sizes;
  int64_t R;
  int64_t D;
  int64_t F;
};

struct Options {
  int64_t P = 2;
  int32_t activation = AB_SILU;
  bool gathers = true;  // slots, some of which are none; else the rows themselves
  bool weighted = true;
  bool biased = true;
  bool in_place = false;  // dh takes the place of h
  WeightLayout layout = {};
};

constexpr int64_t kTopk = 3;
constexpr float kAlpha = 1.25f;  // of activations that have them: h reaches the limit and passes it
constexpr float kLimit = 0.5f;

// Slots in a random order; some rows are padding.
std::vector<int32_t> slots_of_rows(int64_t R, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> slots(static_cast<size_t>(R));
  for (size_t r = 0; r < slots.size(); ++r) slots[r] = static_cast<int32_t>(r);
  std::shuffle(slots.begin(), slots.end(), random);
  for (int32_t& slot : slots) {
    const unsigned draw = random() % 40;
    if (draw == 0) slot = -1;
    if (draw == 1) slot = static_cast<int32_t>((R + kTopk - 1) / kTopk * kTopk);  // the first that is none
    if (draw == 2) slot = INT32_MIN;
  }
  return slots;
}

std::vector<float> random_floats(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = uniform(random);
  return values;
}

// A case on the device, with what comes out.
template <class Element>
struct Layer {
  Layer(const Case& c, const Options& o, unsigned seed)
      : shape(c),
        options(o),
        E(static_cast<int64_t>(c.sizes.size())),
        T(o.gathers ? (c.R + kTopk - 1) / kTopk : c.R),
        num_slots(o.gathers ? T * kTopk : c.R),
        x(random_bits<Element>(T * c.D, seed)),
        w_in(random_bits<Element>(E * c.D * o.P * c.F, seed + 1)),
        b_in(random_bits<Element>(E * o.P * c.F, seed + 2)),
        w_out(random_bits<Element>(E * c.F * c.D, seed + 3)),
        sizes(c.sizes),
        slots(slots_of_rows(c.R, seed + 4)),
        weights(random_floats(num_slots, seed + 5)),
        h(random_bits<Element>(c.R * o.P * c.F, seed + 6)),
        h_out(c.R * o.P * c.F),
        a(c.R * c.F),
        dots((c.F + 127) / 128 * c.R) {}

  static constexpr int32_t kDtype = std::is_same_v<Element, BFloat16> ? AB_BFLOAT16 : AB_FLOAT16;

  RowMap map() const { return {options.gathers ? slots.data() : nullptr, num_slots, options.gathers ? kTopk : 1}; }
  Floats row_weights() const { return options.weighted ? Floats(weights.data(), AB_FLOAT32) : Floats(); }
  template <class Op>
  void fill(Op& op) const {
    op.s.T = options.gathers ? T : 0;
    op.s.K = options.gathers ? kTopk : 0;
    op.s.R = shape.R;
    op.s.E = E;
    op.s.D = shape.D;
    op.s.P = options.P;
    op.s.F = shape.F;
    op.s.layout = options.layout;
    op.map = map();
    op.group_sizes = sizes.data();
    op.weights = row_weights();
    op.activation = activation_of(options.activation, kAlpha, kLimit);
  }
  Up up() const {
    Up op;
    fill(op);
    op.x = {x.data(), kDtype};
    op.w_in = {w_in.data(), kDtype};
    if (options.biased) op.b_in = {b_in.data(), kDtype};
    op.h = {h_out.data(), kDtype};
    op.a = {a.data(), kDtype};
    return op;
  }
  HiddenGradient gradient() const {
    HiddenGradient op;
    fill(op);
    op.d_y = {x.data(), kDtype};
    op.w_out = {w_out.data(), kDtype};
    op.h = {options.in_place ? h_out.data() : h.data(), kDtype};
    op.dh = {h_out.data(), kDtype};
    op.weighted_a = {a.data(), kDtype};
    op.dots = dots.data();
    return op;
  }

  Case shape;
  Options options;
  int64_t E;
  int64_t T;
  int64_t num_slots;
  DeviceArray<uint16_t> x;
  DeviceArray<uint16_t> w_in;
  DeviceArray<uint16_t> b_in;
  DeviceArray<uint16_t> w_out;
  DeviceArray<int32_t> sizes;
  DeviceArray<int32_t> slots;
  DeviceArray<float> weights;
  DeviceArray<uint16_t> h;
  DeviceArray<uint16_t> h_out;  // h of up, or dh
  DeviceArray<uint16_t> a;
  DeviceArray<float> dots;
};

// What a row is, for the references.
struct RowOf {
  int64_t expert;  // E: past the groups
  int64_t source;  // -1: padding
  double weight;
};
__device__ RowOf row_of(const int32_t* sizes, int64_t E, const RowMap& map, const Floats& weights, int64_t r) {
  RowOf row{0, r, 1};
  int64_t end = 0;
  for (; row.expert < E; ++row.expert) {
    end += max(sizes[row.expert], 0);
    if (r < end) break;
  }
  int64_t slot = r;
  if (map.slots != nullptr) {
    slot = map.slots[r];
    row.source = slot >= 0 && slot < map.num_slots ? slot / map.topk : -1;
  }
  if (weights.data != nullptr && row.source >= 0) row.weight = static_cast<const float*>(weights.data)[slot];
  return row;
}

// phi(g, u), and its derivatives.
struct Surface {
  double value;
  double by_gate;
  double by_up;
};
__device__ Surface glu(double value, double slope, double u) { return {value * u, slope * u, value}; }
__device__ Surface surface(int32_t activation, double g, double u) {
  constexpr double kPi = 3.14159265358979323846;
  const double limit = kLimit;
  const double inside = fmin(g, limit);
  const double clamped = fmin(fmax(u, -limit), limit);
  const double g_passes = g > limit ? 0 : 1;
  const double u_passes = fabs(u) > limit ? 0 : 1;
  const auto sigmoid = [](double x) { return 1 / (1 + exp(-x)); };
  const auto swish_slope = [&](double h, double alpha) {
    return sigmoid(alpha * h) * (1 + alpha * h * (1 - sigmoid(alpha * h)));
  };
  switch (activation) {
    case AB_SILU: return glu(g * sigmoid(g), swish_slope(g, 1), u);
    case AB_GELU: {
      const double c = sqrt(2 / kPi);
      const double t = tanh(c * (g + 0.044715 * g * g * g));
      return glu(g / 2 * (1 + t), (1 + t) / 2 + g / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * g * g), u);
    }
    case AB_RELU: return glu(fmax(g, 0.0), g > 0 ? 1.0 : 0.0, u);
    case AB_RELU2: return glu(fmax(g, 0.0) * fmax(g, 0.0), 2 * fmax(g, 0.0), u);
    case AB_GELU_ERF: {
      const double normal = erfc(-g / sqrt(2.0)) / 2;
      return glu(g * normal, normal + g * exp(-g * g / 2) / sqrt(2 * kPi), u);
    }
    case AB_QUICK_GELU: return glu(g * sigmoid(1.702 * g), swish_slope(g, 1.702), u);
    case AB_LINEAR: return glu(g, 1, u);
    case AB_SWIGLU_CLAMPED: {
      const double value = inside * sigmoid(inside);
      return {value * clamped, swish_slope(inside, 1) * clamped * g_passes, value * u_passes};
    }
    case AB_SWIGLU_OAI: {
      const double value = inside * sigmoid(kAlpha * inside);
      return {value * (clamped + 1), swish_slope(inside, kAlpha) * (clamped + 1) * g_passes, value * u_passes};
    }
    case AB_SWIGLU_THEN_CLAMP: {
      const double value = g * sigmoid(g);
      const double slope = value > limit ? 0 : swish_slope(g, 1);
      return {fmin(value, limit) * clamped, slope * clamped, fmin(value, limit) * u_passes};
    }
    default: {
      const double t = tanh(g / kAlpha);
      const double v = tanh(u / limit);
      const double s = sigmoid(g);
      const double slope = (1 - t * t) * s + kAlpha * t * s * (1 - s);
      return {kAlpha * t * s * limit * v, slope * limit * v, kAlpha * t * s * (1 - v * v)};
    }
  }
}

struct Value {
  double value;
  double scale;  // of errors of float32 sums
};

// h [R, P, F] and a [R, F]; a thread a column of a row.
template <class Element>
__global__ void reference_up(Up p, int32_t activation, Value* h, Value* a) {
  const FfnSizes& s = p.s;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= s.R * s.F) return;
  const int64_t r = i / s.F;
  const int64_t f = i % s.F;
  const RowOf row = row_of(p.group_sizes, s.E, p.map, p.weights, r);
  Value parts[2] = {{0, 0}, {0, 0}};
  const bool real = row.expert < s.E && row.source >= 0;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part >= s.P || !real) continue;
    const auto* x = static_cast<const Element*>(p.x.data) + row.source * s.D;
    const auto* w = static_cast<const Element*>(p.w_in.data) + row.expert * s.D * s.P * s.F;
    const int64_t column = s.hidden_column(part, f);
    for (int64_t d = 0; d < s.D; ++d) {
      const int64_t at = s.layout.in_transposed ? column * s.D + d : d * s.P * s.F + column;
      const double term = static_cast<double>(to_float(x[d])) * to_float(w[at]);
      parts[part].value += term;
      parts[part].scale += fabs(term);
    }
    if (p.b_in.data != nullptr) {
      parts[part].value += to_float(static_cast<const Element*>(p.b_in.data)[row.expert * s.P * s.F + column]);
      parts[part].scale += 1;
    }
  }
  h[r * s.P * s.F + s.hidden_column(0, f)] = parts[0];
  if (s.P == 2) h[r * s.P * s.F + s.hidden_column(1, f)] = parts[1];
  const double gate = parts[0].value;
  const double up = s.P == 2 ? parts[1].value : 1;
  const Surface at = surface(activation, gate, up);
  // Bounds of the slopes, also on the other side of a limit.
  const double by_up = fabs(at.by_up) + fabs(gate) + (s.P == 2 ? 1 : 0);
  const double by_gate = (1.2 + 2 * fabs(gate)) * (fabs(up) + 1);
  a[i] = {row.weight * at.value, fabs(row.weight) * (by_up * parts[1].scale + by_gate * (parts[0].scale + fabs(gate)))};
  if (!real) a[i] = {0, 0};
}

template <class Element>
__global__ void reference_gradient(HiddenGradient p, int32_t activation, const uint16_t* h, Value* dh, Value* a,
                                   Value* dots) {
  const FfnSizes& s = p.s;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= s.R * s.F) return;
  const int64_t r = i / s.F;
  const int64_t f = i % s.F;
  const RowOf row = row_of(p.group_sizes, s.E, p.map, p.weights, r);
  Value da{0, 0};
  const bool real = row.expert < s.E && row.source >= 0;
  if (real) {
    const auto* d_y = static_cast<const Element*>(p.d_y.data) + row.source * s.D;
    const auto* w = static_cast<const Element*>(p.w_out.data) + row.expert * s.F * s.D;
    for (int64_t d = 0; d < s.D; ++d) {
      const double term =
          static_cast<double>(to_float(d_y[d])) * to_float(w[s.layout.out_transposed ? d * s.F + f : f * s.D + d]);
      da.value += term;
      da.scale += fabs(term);
    }
  }
  const int64_t gate_at = r * s.P * s.F + s.hidden_column(0, f);
  const int64_t up_at = r * s.P * s.F + s.hidden_column(1, f);
  const double gate_h = to_float(Element{h[gate_at]});
  const double up = s.P == 2 ? to_float(Element{h[up_at]}) : 1;
  const Surface at = surface(activation, gate_h, up);
  const double w = real ? row.weight : 0;
  const double near = 2 + fabs(gate_h);  // of a slope
  const double size = fabs(up) + 1;      // of what a slope is multiplied with
  dh[gate_at] = {w * da.value * at.by_gate, fabs(w) * size * da.scale * near};
  if (s.P == 2) dh[up_at] = {w * da.value * at.by_up, fabs(w * at.by_up) * da.scale};
  a[i] = {w * at.value, fabs(w) * (fabs(at.value) + 0.1 * size)};
  dots[i] = {real ? da.value * at.value : 0, real ? fabs(at.value) * da.scale : 0};
}

template <class Element>
int compare(const char* what, const std::vector<uint16_t>& got, const std::vector<Value>& want, int64_t columns,
            int64_t rows) {
  constexpr double kRound = std::is_same_v<Element, BFloat16> ? 0x1p-8 : 0x1p-11;
  constexpr double kLeast = std::is_same_v<Element, BFloat16> ? 0x1p-120 : 0x1p-24;  // float16's denormals
  Comparison comparison(what);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const auto at = static_cast<size_t>(i);
    comparison.near(i / columns, i % columns, value_of<Element>(got[at]), want[at].value,
                    kRound * std::abs(want[at].value) + 0x1p-19 * want[at].scale + kLeast);
  }
  return comparison.report(false);
}

int64_t rows_of_groups(const Case& c) {
  int64_t rows = 0;
  for (const int32_t size : c.sizes) rows += std::max(size, 0);
  return std::min(rows, c.R);
}

template <class Element>
int check_up(const Case& c, const Options& options, TileChoice tile, unsigned seed) {
  const Layer<Element> layer(c, options, seed);
  const Up op = layer.up();
  if (hopper::why_not(op) != nullptr) {
    std::printf("  BAD not for the tensor cores\n");
    return 1;
  }
  int failures = fails(hopper::multiply(op, tile, multiprocessors(), nullptr));
  const DeviceArray<Value> h(c.R * options.P * c.F);
  const DeviceArray<Value> a(c.R * c.F);
  reference_up<Element>
      <<<static_cast<unsigned>((c.R * c.F + 255) / 256), 256>>>(op, options.activation, h.data(), a.data());
  STEP_CUDA(cudaGetLastError());
  failures += compare<Element>("h", layer.h_out.fetch(&failures), h.fetch(&failures), options.P * c.F, c.R);
  failures += compare<Element>("a", layer.a.fetch(&failures), a.fetch(&failures), c.F, rows_of_groups(c));
  Up without_h = op;  // the same `a` when h is not wanted
  without_h.h = {};
  const std::vector<uint16_t> before = layer.a.fetch(&failures);
  layer.a.poison();
  failures += fails(hopper::multiply(without_h, tile, multiprocessors(), nullptr));
  const std::vector<uint16_t> after = layer.a.fetch(&failures);
  if (std::memcmp(before.data(), after.data(), static_cast<size_t>(rows_of_groups(c) * c.F) * 2) != 0) {
    std::printf("  BAD a without h differs\n");
    ++failures;
  }
  return failures;
}

template <class Element>
int check_gradient(const Case& c, const Options& options, TileChoice tile, unsigned seed) {
  const Layer<Element> layer(c, options, seed);
  const HiddenGradient op = layer.gradient();
  if (hopper::why_not(op) != nullptr) {
    std::printf("  BAD not for the tensor cores\n");
    return 1;
  }
  int failures = 0;
  const std::vector<uint16_t> h = layer.h.fetch(&failures);
  if (options.in_place) {
    STEP_CUDA(cudaMemcpy(layer.h_out.data(), h.data(), h.size() * sizeof(uint16_t), cudaMemcpyHostToDevice));
  }
  failures += fails(hopper::multiply(op, tile, multiprocessors(), nullptr));
  const DeviceArray<Value> dh(c.R * options.P * c.F);
  const DeviceArray<Value> a(c.R * c.F);
  const DeviceArray<Value> dots(c.R * c.F);
  reference_gradient<Element><<<static_cast<unsigned>((c.R * c.F + 255) / 256), 256>>>(
      op, options.activation, layer.h.data(), dh.data(), a.data(), dots.data());
  STEP_CUDA(cudaGetLastError());
  failures += compare<Element>("dh", layer.h_out.fetch(&failures), dh.fetch(&failures), options.P * c.F, c.R);
  failures += compare<Element>("w a", layer.a.fetch(&failures), a.fetch(&failures), c.F, rows_of_groups(c));
  const std::vector<float> got = layer.dots.fetch(&failures);
  const std::vector<Value> want = dots.fetch(&failures);
  Comparison comparison("dots");
  for (int64_t r = 0; r < c.R; ++r) {
    double sum = 0;
    double expected = 0;
    double scale = 0;
    for (int64_t part = 0; part < parts_of_dots(op, tile); ++part) sum += got[static_cast<size_t>(part * c.R + r)];
    for (int64_t f = 0; f < c.F; ++f) {
      expected += want[static_cast<size_t>(r * c.F + f)].value;
      scale += want[static_cast<size_t>(r * c.F + f)].scale;
    }
    comparison.near(r, 0, sum, expected, 0x1p-19 * scale);
  }
  return failures + comparison.report(false);
}

// Every option with every shape of tiles.
template <class Check>
int check_all(const Check& check) {
  const Case cases[] = {
      {{128}, 128, 64, 128},
      {{1}, 1, 8, 8},
      {{70}, 100, 128, 200},
      {{0, 1, 128, 0, 0, 129, 127, 700, 0, 64, 65}, 1300, 264, 328},
      {{300, 300, 300, 300}, 1200, 512, 256},
      {{0, 0, 0}, 300, 64, 64},
  };
  int failures = 0;
  unsigned seed = 100;
  for (const Case& c : cases) {
    for (const TileChoice tile : {TileChoice::k128x256, TileChoice::k128x128}) {
      for (int variant = 0; variant < 24; ++variant) {
        Options options;
        options.layout.in_transposed = variant >= 10 && variant % 2 == 0;
        options.layout.out_transposed = variant >= 10 && variant / 2 % 2 == 0;
        options.layout.interleaved = variant >= 10 && variant % 3 != 2 && variant / 4 % 2 == 1;
        options.P = variant % 3 == 2 ? 1 : 2;
        options.activation = static_cast<int32_t>(seed / 10 % (options.P == 2 ? AB_SITU + 1 : AB_SWIGLU_CLAMPED));
        options.gathers = variant % 2 == 0;
        options.weighted = variant % 5 != 1;
        options.biased = variant % 3 != 1;
        options.in_place = variant % 4 == 3 || variant == 4;
        const int bad = check(c, options, tile, variant % 5 == 3, seed += 10);
        if (bad != 0) {
          std::printf("  BAD R %lld D %lld F %lld tile %d variant %d\n", static_cast<long long>(c.R),
                      static_cast<long long>(c.D), static_cast<long long>(c.F), static_cast<int>(tile), variant);
        }
        failures += bad;
      }
    }
  }
  return failures;
}

}  // namespace

int up_products() {
  return check_all([](const Case& c, const Options& options, TileChoice tile, bool half, unsigned seed) {
    return half ? check_up<Float16>(c, options, tile, seed) : check_up<BFloat16>(c, options, tile, seed);
  });
}

int hidden_gradients() {
  return check_all([](const Case& c, const Options& options, TileChoice tile, bool half, unsigned seed) {
    return half ? check_gradient<Float16>(c, options, tile, seed) : check_gradient<BFloat16>(c, options, tile, seed);
  });
}

namespace {

// y [R, D] = scale a W_out + weight b; here x [R, D] plays `a` and w_in with P = 1 is W_out.
__global__ void reference_finish(Up p, bool scales, Value* y) {
  const FfnSizes& s = p.s;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= s.R * s.F) return;
  const int64_t r = i / s.F;
  const int64_t f = i % s.F;
  RowOf row = row_of(p.group_sizes, s.E, p.map, p.weights, r);
  const bool real = row.expert < s.E && row.source >= 0;
  Value sum{0, 0};
  for (int64_t d = 0; d < s.D && real; ++d) {
    const double term = static_cast<double>(to_float(static_cast<const BFloat16*>(p.x.data)[r * s.D + d])) *
                        to_float(static_cast<const BFloat16*>(p.w_in.data)[(row.expert * s.D + d) * s.F + f]);
    sum.value += term;
    sum.scale += fabs(term);
  }
  if (scales) sum.value *= row.weight;
  if (real && p.b_in.data != nullptr) {
    sum.value += row.weight * to_float(static_cast<const BFloat16*>(p.b_in.data)[row.expert * s.F + f]);
    sum.scale += 1;
  }
  y[i] = sum;
}

}  // namespace

int products_with_bias_and_weights() {
  int failures = 0;
  const Case cases[] = {{{70}, 100, 128, 200}, {{0, 1, 128, 0, 129, 700, 65}, 1100, 264, 328}};
  for (const Case& c : cases) {
    for (const TileModel& model : kTileModels) {
      for (int variant = 0; variant < 6; ++variant) {
        Options options;
        options.P = 1;
        options.gathers = variant % 2 == 0;
        options.weighted = variant % 3 != 0;
        options.biased = variant != 1;  // one of them at least
        const Layer<BFloat16> layer(c, options, 500 + static_cast<unsigned>(variant));
        const DeviceArray<uint16_t> x(random_bits<BFloat16>(c.R * c.D, 600));
        Up op = layer.up();
        op.x.data = x.data();
        RowsProduct product;
        product.x = x.data();
        product.w = op.w_in.data;
        product.group_sizes = op.group_sizes;
        product.y = layer.a.data();
        product.bias = op.b_in.data;
        product.map = op.map;
        product.weights = op.weights;
        product.weight_early = variant >= 3;
        product.dtype = AB_BFLOAT16;
        product.R = c.R;
        product.E = layer.E;
        product.D = c.D;
        product.N = c.F;
        failures += fails(hopper::multiply(product, model.choice, multiprocessors(), nullptr));
        if (!options.weighted) {  // such products don't know padding
          const Floats written{product.y, product.dtype};
          failures += fails(clear_padding(product.map, written, product.R, product.N, multiprocessors(), nullptr));
        }
        const DeviceArray<Value> y(c.R * c.F);
        reference_finish<<<static_cast<unsigned>((c.R * c.F + 255) / 256), 256>>>(op, product.scales(), y.data());
        STEP_CUDA(cudaGetLastError());
        failures += compare<BFloat16>("y", layer.a.fetch(&failures), y.fetch(&failures), c.F, c.R);
      }
    }
  }
  return failures;
}

}  // namespace anabranch::steps
