// An expert MLP with low-rank adapters, for tests on the GPU against the CPU.
#pragma once

#include <optional>

#include "ffn_case.h"

namespace anabranch::testing {

struct LoraCase {
  FfnCase c;
  int64_t r = 0;        // rank of the adapter of W_in; 0: none
  int64_t q = 0;        // of W_out
  unsigned shared = 0;  // bits: A_in, B_in, A_out, B_out
  int32_t dtype = 0;    // of the factors; 0: that of x
  int order = 0;        // of the factors' axes in memory: row-major, transposed, or the expert innermost
  bool frozen = true;   // no gradients of W and of biases
  bool saves_u = true;  // u is saved for the backward pass
  int copies = 0;       // 1 to 4: order of the axes of copies, which the backward pass reads; 0: no copies

  bool is_shared(int factor) const { return (shared >> factor & 1u) != 0; }
  int32_t factor_dtype() const { return dtype == 0 ? c.dtype : dtype; }
};

inline std::ostream& operator<<(std::ostream& out, const LoraCase& l) {
  return out << l.c << " r " << l.r << " q " << l.q << " shared " << l.shared << " factors " << l.factor_dtype()
             << " order " << l.order << (l.frozen ? " frozen" : "") << (l.saves_u ? "" : " u computed again")
             << " copies " << l.copies;
}

// A factor with its gradient. The gradient is row-major.
struct LoraFactor {
  FloatTensor values;
  FloatTensor gradient;
  FloatTensor copy;
  std::unique_ptr<Ordered> view;
  std::unique_ptr<Ordered> copy_view;

  LoraFactor(const LoraCase& l, int index, std::vector<int64_t> shape, unsigned seed)
      : values(shape, l.factor_dtype()),
        gradient(shape, l.c.accumulate ? AB_FLOAT32 : l.factor_dtype()),
        copy(shape, l.c.dtype) {
    const bool is_a = index % 2 == 0;
    const int64_t sums = is_a ? shape[1] : shape[1] * 2;
    values.fill_uniform(seed);
    const float scale = std::sqrt(3.0f / static_cast<float>(sums + 1));
    for (int64_t i = 0; i < values.size(); ++i) values.set(i, scale * values.get(i));
    if (l.c.accumulate) gradient.fill_uniform(seed + 100);
    const bool parts = shape.size() == 4;
    const std::vector<int> orders[] = {parts ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 1, 2},
                                       parts ? std::vector<int>{0, 2, 3, 1} : std::vector<int>{0, 2, 1},
                                       parts ? std::vector<int>{3, 2, 1, 0} : std::vector<int>{2, 1, 0}};
    view = std::make_unique<Ordered>(values.view(), orders[l.order]);
    // Without rows a copy keeps its NaN, which nothing reads.
    for (int64_t i = 0; i < copy.size(); ++i) copy.set(i, std::numeric_limits<float>::quiet_NaN());
    const std::vector<int> of_parts[] = {{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}};
    const int order = std::max(l.copies - 1, 0);
    copy_view = std::make_unique<Ordered>(copy.view(), parts ? of_parts[order] : orders[order % 2]);
  }
};

struct LoraNetwork {
  LoraCase l;
  Network net;
  std::optional<LoraFactor> factors[4];  // A_in, B_in, A_out, B_out
  FloatTensor u, z, v_in, v_out;

  explicit LoraNetwork(const LoraCase& shape, unsigned seed = 1)
      : l(shape),
        net(shape.c, seed),
        u({shape.c.R, shape.r}, shape.c.dtype),
        z({shape.c.R, shape.q}, shape.c.dtype),
        v_in({shape.c.R, shape.r}, shape.c.dtype),
        v_out({shape.c.R, shape.q}, shape.c.dtype) {
    const auto matrices = [&](int factor) { return l.is_shared(factor) ? 1 : l.c.E(); };
    if (l.r > 0) {
      factors[0].emplace(l, 0, std::vector<int64_t>{matrices(0), l.c.D, l.r}, seed + 11);
      factors[1].emplace(l, 1, std::vector<int64_t>{matrices(1), l.r, l.c.P, l.c.F}, seed + 12);
    }
    if (l.q > 0) {
      factors[2].emplace(l, 2, std::vector<int64_t>{matrices(2), l.c.F, l.q}, seed + 13);
      factors[3].emplace(l, 3, std::vector<int64_t>{matrices(3), l.q, l.c.D}, seed + 14);
    }
  }

  template <class Args>
  void set_factors(bool are_copies, Args* args) const {
    args->lora_scale_in = l.r > 0 ? 0.75f : 0.0f;
    args->lora_scale_out = l.q > 0 ? -1.25f : 0.0f;
    const ab_tensor** views[] = {&args->lora_a_in, &args->lora_b_in, &args->lora_a_out, &args->lora_b_out};
    for (int i = 0; i < 4; ++i) {
      if (factors[i]) *views[i] = (are_copies ? factors[i]->copy_view : factors[i]->view)->view();
    }
  }

  ab_expert_ffn_forward_args forward_args() const {
    ab_expert_ffn_forward_args args = net.forward_args();
    set_factors(false, &args);
    const ab_tensor** copies[] = {&args.lora_a_in_copy, &args.lora_b_in_copy, &args.lora_a_out_copy,
                                  &args.lora_b_out_copy};
    for (int i = 0; i < 4; ++i) {
      if (factors[i] && l.copies > 0) *copies[i] = factors[i]->copy_view->view();
    }
    args.lora_u = l.r > 0 ? u.view() : nullptr;
    args.lora_z = l.q > 0 ? z.view() : nullptr;
    return args;
  }

  // Reads the u that forward_args() wrote, or none.
  ab_expert_ffn_backward_args backward_args() const {
    ab_expert_ffn_backward_args args = net.backward_args();
    if (l.frozen) {
      args.d_w_in = args.d_b_in = args.d_w_out = args.d_b_out = nullptr;
    }
    set_factors(l.copies > 0, &args);
    args.lora_u = l.r > 0 && l.saves_u ? u.view() : nullptr;
    args.lora_v_in = l.r > 0 ? v_in.view() : nullptr;
    args.lora_v_out = l.q > 0 ? v_out.view() : nullptr;
    const ab_tensor** gradients[] = {&args.d_lora_a_in, &args.d_lora_b_in, &args.d_lora_a_out, &args.d_lora_b_out};
    for (int i = 0; i < 4; ++i) *gradients[i] = factors[i] ? factors[i]->gradient.view() : nullptr;
    return args;
  }

  void on_cpu() const {
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward_args()));
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward_args()));
  }
  void on_gpu() const {
    Network::forward_on_gpu(forward_args());
    Network::backward_on_gpu(backward_args());
  }

  // Compares all results bit for bit.
  void expect_same_bits(const LoraNetwork& other) const {
    net.expect_same_bits(other.net);
    EXPECT_TRUE(u.is(other.u)) << "u";
    EXPECT_TRUE(z.is(other.z)) << "z";
    EXPECT_TRUE(v_in.is(other.v_in)) << "v_in";
    EXPECT_TRUE(v_out.is(other.v_out)) << "v_out";
    for (int i = 0; i < 4; ++i) {
      if (!factors[i]) continue;
      EXPECT_TRUE(factors[i]->gradient.is(other.factors[i]->gradient)) << "gradient of factor " << i;
    }
  }
};

inline void compare(const LoraNetwork& got, const LoraNetwork& want) {
  compare_rows("y", want.net, got.net.y, want.net.y);
  compare_rows("h", want.net, got.net.h, want.net.h);
  compare_rows("dh", want.net, got.net.dh, want.net.dh);
  compare_rows("dx_rows", want.net, got.net.dx_rows, want.net.dx_rows);
  // d_weights contains v_out times terms of order 1. The backends round some elements of v_out to different neighbours.
  const auto tolerance = [&](int64_t row) {
    double sum = 0;
    for (int64_t i = row * want.l.q; i < (row + 1) * want.l.q; ++i) {
      sum += std::abs(got.v_out.get(i) - want.v_out.get(i));
    }
    return 4 * sum;
  };
  compare_slots(want.net, got.net.d_weights, want.net.d_weights, tolerance);
  if (want.l.r > 0) {
    compare_rows("u", want.net, got.u, want.u);
    compare_rows("v_in", want.net, got.v_in, want.v_in);
  }
  if (want.l.q > 0) {
    compare_rows("z", want.net, got.z, want.z);
    compare_rows("v_out", want.net, got.v_out, want.v_out);
  }
  constexpr const char* kNames[] = {"d_lora_a_in", "d_lora_b_in", "d_lora_a_out", "d_lora_b_out"};
  for (int i = 0; i < 4; ++i) {
    if (!want.factors[i]) continue;
    const FloatTensor& expected = want.factors[i]->gradient;
    if (want.l.is_shared(i)) {
      compare_elements(kNames[i], want.l.c, got.factors[i]->gradient, expected, 0, expected.size());
    } else {
      compare_experts(kNames[i], want.l.c, got.factors[i]->gradient, expected);
    }
  }
  if (want.l.frozen) return;
  compare_experts("d_w_in", want.l.c, got.net.d_w_in, want.net.d_w_in);
  compare_experts("d_b_in", want.l.c, got.net.d_b_in, want.net.d_b_in);
  compare_experts("d_w_out", want.l.c, got.net.d_w_out, want.net.d_w_out);
  compare_experts("d_b_out", want.l.c, got.net.d_b_out, want.net.d_b_out);
}

// Checks every result against the CPU, and that a second run gives the same bits.
inline void check(const LoraCase& l, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << l);
  const LoraNetwork want(l, seed);
  want.on_cpu();
  const LoraNetwork got(l, seed);
  got.on_gpu();
  if (::testing::Test::HasFatalFailure()) return;
  compare(got, want);
  if (::testing::Test::HasFatalFailure()) return;
  const LoraNetwork again(l, seed);
  again.on_gpu();
  again.expect_same_bits(got);
}

}  // namespace anabranch::testing
