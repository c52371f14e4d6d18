// An expert MLP with operands of any dtype, for tests on the GPU against the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <vector>

#include "anabranch/cuda.h"
#include "experts_case.h"

namespace anabranch::testing {

enum class Weighting { none, late, early };

struct FfnCase {
  std::vector<int32_t> sizes;
  int64_t R = 0;
  int64_t D = 0;
  int64_t F = 0;
  int64_t P = 2;
  int64_t T = 0;  // 0: x has one row per row of y
  int64_t K = 0;
  int32_t dtype = AB_BFLOAT16;
  int32_t activation = AB_SILU;
  Weighting weighting = Weighting::late;
  bool biases = true;
  int32_t d_out = 0;  // dtype; 0: dtype of x
  int32_t weights = AB_FLOAT32;
  bool accumulate = false;  // accumulate the gradients of weights, in float32
  int layout = 0;           // index into kLayouts
  int32_t precision = AB_PRECISION_HIGHEST;
  bool has_weights = true;  // false: W_in, W_out and their gradients are empty

  int64_t E() const { return static_cast<int64_t>(sizes.size()); }
  int64_t matrices() const { return has_weights ? E() : 0; }
  bool by_slot() const { return K > 0; }
};

// Memory order of the axes of W_in [E, D, P, F] and W_out [E, F, D], outermost first.
struct Layout {
  std::vector<int> in;
  std::vector<int> out;

  // Memory order of b_in [E, P, F] and h [R, P, F].
  std::vector<int> intermediate() const {
    const bool interleaved = std::find(in.begin(), in.end(), 3) < std::find(in.begin(), in.end(), 2);
    return interleaved ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2};
  }
};
inline const std::vector<Layout> kLayouts = {
    {{0, 1, 2, 3}, {0, 1, 2}}, {{0, 2, 3, 1}, {0, 2, 1}}, {{0, 1, 3, 2}, {0, 1, 2}}, {{0, 3, 2, 1}, {0, 2, 1}},
    {{0, 2, 3, 1}, {0, 1, 2}}, {{0, 1, 3, 2}, {0, 2, 1}}, {{0, 3, 2, 1}, {0, 1, 2}}, {{0, 1, 2, 3}, {0, 2, 1}},
};

// A view that reads the memory of a row-major tensor in another axis order.
class Ordered {
 public:
  Ordered(const ab_tensor* tensor, const std::vector<int>& order) : view_(*tensor) {
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides_[order[i]] = stride;
      stride *= std::max<int64_t>(view_.shape[order[i]], 1);
    }
    view_.strides = strides_;
  }
  Ordered(const Ordered&) = delete;
  Ordered& operator=(const Ordered&) = delete;
  const ab_tensor* view() const { return &view_; }

 private:
  ab_tensor view_;
  int64_t strides_[AB_MAX_RANK] = {};
};

inline std::ostream& operator<<(std::ostream& out, const FfnCase& c) {
  return out << "R " << c.R << " E " << c.E() << " D " << c.D << " P " << c.P << " F " << c.F << " T " << c.T << " K "
             << c.K << " dtype " << c.dtype << " activation " << c.activation << " weighting "
             << static_cast<int>(c.weighting) << (c.biases ? " biases" : "") << " d_out " << c.d_out << " weights "
             << c.weights << (c.accumulate ? " accumulated" : "") << " layout " << c.layout
             << (c.precision == AB_PRECISION_TF32 ? " TF32" : "");
}

// Parameters of the activation, 0 if it has none. Values of h are below and above the limit.
inline float alpha_of(int32_t activation) {
  return activation == AB_SWIGLU_OAI || activation == AB_SITU ? 1.25f : 0.0f;
}
inline float limit_of(int32_t activation) { return activation >= AB_SWIGLU_CLAMPED ? 0.5f : 0.0f; }

struct Network {
  using ForwardArgs = ab_expert_ffn_forward_args;
  using BackwardArgs = ab_expert_ffn_backward_args;

  FfnCase c;
  std::vector<int64_t> ends;
  Tensor<int32_t> sizes;
  Tensor<int32_t> slots;
  FloatTensor x, w_in, b_in, w_out, b_out, weights, saved_h, d_out;
  // Results.
  FloatTensor y, h, dh, dx_rows, d_w_in, d_b_in, d_w_out, d_b_out, d_weights;
  // Views in the layout of the case.
  Ordered w_in_view, b_in_view, w_out_view, saved_h_view, h_view, dh_view, d_w_in_view, d_b_in_view, d_w_out_view;

  explicit Network(const FfnCase& shape, unsigned seed = 1)
      : c(shape),
        ends(ends_of(c.sizes, c.R)),
        sizes({c.E()}, c.sizes),
        slots({c.R}),
        x({source_rows(), c.D}, c.dtype),
        w_in({c.matrices(), c.D, c.P, c.F}, c.dtype),
        b_in({c.E(), c.P, c.F}, c.dtype),
        w_out({c.matrices(), c.F, c.D}, c.dtype),
        b_out({c.E(), c.D}, c.dtype),
        weights(slot_shape(), c.weights),
        saved_h({c.R, c.P, c.F}, c.dtype),
        d_out({source_rows(), c.D}, c.d_out == 0 ? c.dtype : c.d_out),
        y({c.R, c.D}, c.dtype),
        h({c.R, c.P, c.F}, c.dtype),
        dh({c.R, c.P, c.F}, c.dtype),
        dx_rows({c.R, c.D}, c.dtype),
        d_w_in({c.matrices(), c.D, c.P, c.F}, c.accumulate ? AB_FLOAT32 : c.dtype),
        d_b_in({c.E(), c.P, c.F}, c.dtype),
        d_w_out({c.matrices(), c.F, c.D}, c.accumulate ? AB_FLOAT32 : c.dtype),
        d_b_out({c.E(), c.D}, c.dtype),
        d_weights(slot_shape(), AB_FLOAT32),
        w_in_view(w_in.view(), layout().in),
        b_in_view(b_in.view(), layout().intermediate()),
        w_out_view(w_out.view(), layout().out),
        saved_h_view(saved_h.view(), layout().intermediate()),
        h_view(h.view(), layout().intermediate()),
        dh_view(dh.view(), layout().intermediate()),
        d_w_in_view(d_w_in.view(), layout().in),
        d_b_in_view(d_b_in.view(), layout().intermediate()),
        d_w_out_view(d_w_out.view(), layout().out) {
    place_slots(seed);
    for (FloatTensor* tensor : {&x, &b_in, &b_out, &weights, &saved_h, &d_out}) tensor->fill_uniform(++seed);
    fill_scaled(w_in, std::sqrt(3.0f / static_cast<float>(c.D + 1)), ++seed);
    fill_scaled(w_out, std::sqrt(3.0f / static_cast<float>(c.F + 1)), ++seed);
    fill_unused_with_nan();
    if (!c.accumulate) return;
    d_w_in.fill_uniform(++seed);
    d_w_out.fill_uniform(++seed);
  }

  // Returns the slot of row r, or -1 for padding and rows past the groups.
  int64_t slot_of(int64_t r) const {
    if (ends.empty() || r >= ends.back()) return -1;
    if (!c.by_slot()) return r;
    return slots[r] >= 0 && slots[r] < c.T * c.K ? slots[r] : -1;
  }

  const Layout& layout() const { return kLayouts[static_cast<size_t>(c.layout)]; }

  ForwardArgs forward_args() const {
    const bool weighted = c.weighting != Weighting::none;
    ForwardArgs args{};
    args.size = sizeof(args);
    args.activation = c.activation;
    args.weight_early = c.weighting == Weighting::early ? 1 : 0;
    args.topk = static_cast<int32_t>(c.K);
    args.x = x.view();
    args.slot_of_row = c.by_slot() ? slots.view() : nullptr;
    args.group_sizes = sizes.view();
    args.w_in = w_in_view.view();
    args.b_in = c.biases ? b_in_view.view() : nullptr;
    args.w_out = w_out_view.view();
    args.b_out = c.biases ? b_out.view() : nullptr;
    args.weights = weighted ? weights.view() : nullptr;
    args.y = y.view();
    args.h = h_view.view();
    args.activation_alpha = alpha_of(c.activation);
    args.activation_limit = limit_of(c.activation);
    args.precision = c.precision;
    return args;
  }
  // Reads saved_h instead of h, so that both backends start from the same values.
  BackwardArgs backward_args() const {
    BackwardArgs args{};
    args.size = sizeof(args);
    args.activation = c.activation;
    args.topk = static_cast<int32_t>(c.K);
    args.accumulate = c.accumulate ? 1 : 0;
    args.x = x.view();
    args.slot_of_row = c.by_slot() ? slots.view() : nullptr;
    args.group_sizes = sizes.view();
    args.w_in = w_in_view.view();
    args.w_out = w_out_view.view();
    args.b_out = c.biases ? b_out.view() : nullptr;
    args.weights = c.weighting != Weighting::none ? weights.view() : nullptr;
    args.h = saved_h_view.view();
    args.d_out = d_out.view();
    args.dh = dh_view.view();
    args.dx_rows = dx_rows.view();
    args.d_w_in = d_w_in_view.view();
    args.d_b_in = d_b_in_view.view();
    args.d_w_out = d_w_out_view.view();
    args.d_b_out = d_b_out.view();
    args.d_weights = d_weights.view();
    args.activation_alpha = alpha_of(c.activation);
    args.activation_limit = limit_of(c.activation);
    args.precision = c.precision;
    return args;
  }

  void on_cpu() const {
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward_args()));
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward_args()));
  }
  void on_gpu() const {
    forward_on_gpu(forward_args());
    backward_on_gpu(backward_args());
  }
  static void forward_on_gpu(const ForwardArgs& args) {
    using A = ForwardArgs;
    run_on_copies(ab_cuda_expert_ffn_forward_workspace, ab_cuda_expert_ffn_forward, args, &A::x, &A::slot_of_row,
                  &A::group_sizes, &A::w_in, &A::b_in, &A::w_out, &A::b_out, &A::weights, &A::y, &A::h, &A::a,
                  &A::lora_a_in, &A::lora_b_in, &A::lora_a_out, &A::lora_b_out, &A::lora_u, &A::lora_z,
                  &A::lora_a_in_copy, &A::lora_b_in_copy, &A::lora_a_out_copy, &A::lora_b_out_copy,
                  &A::w_in_block_scales, &A::w_out_block_scales);
  }
  static void backward_on_gpu(const BackwardArgs& args) {
    using A = BackwardArgs;
    run_on_copies(ab_cuda_expert_ffn_backward_workspace, ab_cuda_expert_ffn_backward, args, &A::x, &A::slot_of_row,
                  &A::group_sizes, &A::w_in, &A::w_out, &A::b_out, &A::weights, &A::h, &A::d_out, &A::dh, &A::dx_rows,
                  &A::d_w_in, &A::d_b_in, &A::d_w_out, &A::d_b_out, &A::d_weights, &A::weighted_a, &A::lora_a_in,
                  &A::lora_b_in, &A::lora_a_out, &A::lora_b_out, &A::lora_u, &A::lora_v_in, &A::lora_v_out,
                  &A::d_lora_a_in, &A::d_lora_b_in, &A::d_lora_a_out, &A::d_lora_b_out, &A::w_in_block_scales,
                  &A::w_out_block_scales);
  }

  // Compares all results bit for bit.
  void expect_same_bits(const Network& other) const {
    EXPECT_TRUE(y.is(other.y)) << "y";
    EXPECT_TRUE(h.is(other.h)) << "h";
    EXPECT_TRUE(dh.is(other.dh)) << "dh";
    EXPECT_TRUE(dx_rows.is(other.dx_rows)) << "dx_rows";
    EXPECT_TRUE(d_w_in.is(other.d_w_in)) << "d_w_in";
    EXPECT_TRUE(d_b_in.is(other.d_b_in)) << "d_b_in";
    EXPECT_TRUE(d_w_out.is(other.d_w_out)) << "d_w_out";
    EXPECT_TRUE(d_b_out.is(other.d_b_out)) << "d_b_out";
    EXPECT_TRUE(d_weights.is(other.d_weights)) << "d_weights";
  }

 private:
  int64_t source_rows() const { return c.by_slot() ? c.T : c.R; }
  std::vector<int64_t> slot_shape() const {
    return c.by_slot() ? std::vector<int64_t>{c.T, c.K} : std::vector<int64_t>{c.R};
  }

  // Assigns slots in random order, each at most once. A tenth of the rows get an invalid slot.
  void place_slots(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> order(static_cast<size_t>(c.T * c.K));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const int32_t none[] = {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(c.T * c.K), -7};
    for (int64_t r = 0; r < c.R; ++r) {
      if (order.empty() || random() % 10 == 0) {
        slots[r] = none[random() % 5];
      } else {
        slots[r] = order.back();
        order.pop_back();
      }
    }
  }

  static void fill_scaled(FloatTensor& tensor, float scale, unsigned seed) {
    tensor.fill_uniform(seed);
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, scale * tensor.get(i));
  }

  // Fills tokens, weights and rows without an assignment with NaN to check that they are ignored.
  void fill_unused_with_nan() {
    std::vector<bool> used_slots(static_cast<size_t>(std::max(c.R, c.T * c.K)));
    std::vector<bool> used_sources(static_cast<size_t>(source_rows()));
    for (int64_t r = 0; r < c.R; ++r) {
      const int64_t slot = slot_of(r);
      if (slot < 0) {
        fill_nan(saved_h, r * c.P * c.F, c.P * c.F);
      } else {
        used_slots[static_cast<size_t>(slot)] = true;
        used_sources[static_cast<size_t>(c.by_slot() ? slot / c.K : r)] = true;
      }
    }
    for (int64_t slot = 0; slot < weights.size(); ++slot) {
      if (!used_slots[static_cast<size_t>(slot)]) fill_nan(weights, slot, 1);
    }
    for (int64_t source = 0; source < source_rows(); ++source) {
      if (used_sources[static_cast<size_t>(source)]) continue;
      fill_nan(x, source * c.D, c.D);
      fill_nan(d_out, source * c.D, c.D);
    }
  }

  static void fill_nan(FloatTensor& tensor, int64_t begin, int64_t count) {
    for (int64_t i = begin; i < begin + count; ++i) tensor.set(i, std::numeric_limits<float>::quiet_NaN());
  }
};

// The relative error of intermediate results. dh and w a are rounded to the dtype before other results use them. TF32
// rounds operands to 2^-10 on the GPU only. With FP8 an element of `a` or dh that lies between two e4m3 numbers may get
// either; they are 1/8 apart, and sums have at least 128 terms.
inline double rounding_of(const FfnCase& c) {
  if (c.precision == AB_PRECISION_FP8) return 0x1p-7;
  return c.precision == AB_PRECISION_TF32 ? 0x1p-10 : rounding_of(c.dtype);
}

// Compares elements [begin, end) of one expert. Both backends round the same sums, mostly to the same number. The norm
// of the error is below two roundings per element; a single error is below eight roundings of the typical magnitude.
inline void compare_elements(const char* name, const FfnCase& c, const FloatTensor& got, const FloatTensor& want,
                             int64_t begin, int64_t end) {
  double error = 0;
  double norm = 0;
  for (int64_t i = begin; i < end; ++i) {
    ASSERT_TRUE(std::isfinite(want.get(i))) << name << " of the CPU at " << i;
    norm += static_cast<double>(want.get(i)) * want.get(i);
  }
  const double size = end == begin ? 0 : std::sqrt(norm / static_cast<double>(end - begin));
  const double rounding = rounding_of(c) + 2e-6;
  for (int64_t i = begin; i < end; ++i) {
    const double difference = static_cast<double>(got.get(i)) - want.get(i);
    ASSERT_LE(std::abs(difference), 8 * rounding * (std::abs(want.get(i)) + size))
        << name << " at " << i << ": got " << got.get(i) << ", expected " << want.get(i);
    error += difference * difference;
  }
  ASSERT_LE(std::sqrt(error), 2 * rounding * std::sqrt(norm)) << name << " of an expert";
}

// Compares a tensor [E, ...] expert by expert.
inline void compare_experts(const char* name, const FfnCase& c, const FloatTensor& got, const FloatTensor& want) {
  const int64_t each = c.E() == 0 ? 0 : want.size() / c.E();
  for (int64_t e = 0; e < c.E(); ++e) compare_elements(name, c, got, want, e * each, (e + 1) * each);
}

// Compares a tensor [R, ...] expert by expert. Padding rows and rows past the groups must be zero.
inline void compare_rows(const char* name, const Network& net, const FloatTensor& got, const FloatTensor& want) {
  const int64_t width = net.c.R == 0 ? 0 : want.size() / net.c.R;
  int64_t begin = 0;
  for (const int64_t end : net.ends) {
    compare_elements(name, net.c, got, want, begin * width, end * width);
    begin = end;
  }
  for (int64_t r = 0; r < net.c.R; ++r) {
    for (int64_t i = r * width; net.slot_of(r) < 0 && i < (r + 1) * width; ++i) {
      ASSERT_EQ(got.get(i), 0.0f) << name << " row " << r << " is padding";
    }
  }
}

// Compares d_weights. Each element is a sum of F + D terms of order 1, some of which cancel; without a row it is zero.
// tolerance(r): added for row r.
template <class Tolerance>
void compare_slots(const Network& net, const FloatTensor& got, const FloatTensor& want, const Tolerance& tolerance) {
  std::vector<double> limits(static_cast<size_t>(want.size()));
  // FP8 tensor cores sum with at least 14 bits.
  const double each = net.c.precision == AB_PRECISION_TF32  ? 2 * 0x1p-10
                      : net.c.precision == AB_PRECISION_FP8 ? 0x1p-11
                                                            : 2e-6;
  for (int64_t r = 0; r < net.c.R; ++r) {
    if (net.slot_of(r) < 0) continue;
    limits[static_cast<size_t>(net.slot_of(r))] =
        each * std::sqrt(static_cast<double>(net.c.F + net.c.D)) + tolerance(r);
  }
  for (int64_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got.get(i), want.get(i), limits[static_cast<size_t>(i)]) << "d_weights at " << i;
  }
}
inline void compare_slots(const Network& net, const FloatTensor& got, const FloatTensor& want) {
  compare_slots(net, got, want, [](int64_t) { return 0.0; });
}

inline void compare(const Network& got, const Network& want) {
  compare_rows("y", want, got.y, want.y);
  compare_rows("h", want, got.h, want.h);
  compare_rows("dh", want, got.dh, want.dh);
  compare_rows("dx_rows", want, got.dx_rows, want.dx_rows);
  compare_experts("d_w_in", want.c, got.d_w_in, want.d_w_in);
  compare_experts("d_b_in", want.c, got.d_b_in, want.d_b_in);
  compare_experts("d_w_out", want.c, got.d_w_out, want.d_w_out);
  compare_experts("d_b_out", want.c, got.d_b_out, want.d_b_out);
  compare_slots(want, got.d_weights, want.d_weights);
}

// Checks every result against the CPU, and that a second run gives the same bits.
inline void check(const FfnCase& c, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << c);
  const Network want(c, seed);
  want.on_cpu();
  const Network got(c, seed);
  got.on_gpu();
  if (::testing::Test::HasFatalFailure()) return;
  compare(got, want);
  if (::testing::Test::HasFatalFailure()) return;
  const Network again(c, seed);
  again.on_gpu();
  again.expect_same_bits(got);
}

// Checks with and without biases.
inline void check_with_and_without_biases(FfnCase c) {
  for (const bool biases : {true, false}) {
    c.biases = biases;
    check(c);
  }
}

}  // namespace anabranch::testing
