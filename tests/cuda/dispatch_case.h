// A test case of dispatch and combine: shape, dtypes, gather and scatter indices, operands, results, and the calls of
// both libraries.
#pragma once

#include <limits>
#include <ostream>
#include <random>

#include "anabranch/cuda.h"
#include "device.h"
#include "float_tensor.h"

namespace anabranch::testing {

struct Case {
  int64_t T = 40;
  int64_t K = 3;
  int64_t D = 64;
  int32_t E = 6;
  int32_t align = 8;
  double share = 1.0;           // fraction of the rows that all assignments need; below 1 some are dropped
  int32_t dtype = AB_BFLOAT16;  // dtype of tokens
  int32_t rows_dtype = 0;       // 0: dtype
  int32_t d_dtype = 0;          // dtype of the gradients; 0: dtype
  int32_t weights_dtype = AB_FLOAT32;
  int32_t addend_dtype = 0;  // 0: no addend
  bool weighted = true;
  bool garbage = false;   // garbage indices
  bool specials = false;  // NaN, infinities, zeros of both signs
  int64_t shift = 0;      // offset of float tensors from an aligned address, in elements

  int64_t num_rows() const {
    const int64_t a = std::max(align, 1);
    return static_cast<int64_t>(static_cast<double>((T * K + E * (a - 1)) / a) * share) * a;
  }
  int32_t dtype_of_rows() const { return rows_dtype == 0 ? dtype : rows_dtype; }
  int32_t dtype_of_gradients() const { return d_dtype == 0 ? dtype : d_dtype; }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "T " << c.T << " K " << c.K << " D " << c.D << " align " << c.align << " share " << c.share
             << " dtypes " << c.dtype << " " << c.rows_dtype << " " << c.d_dtype << " " << c.weights_dtype << " "
             << c.addend_dtype << " weighted " << c.weighted << " garbage " << c.garbage << " specials " << c.specials
             << " shift " << c.shift;
}

// Arbitrary contents of an index buffer: small, large, negative and extreme values.
inline void fill_with_garbage(Tensor<int32_t>* tensor, int64_t limit, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> near(-3, static_cast<int32_t>(limit) + 3);
  for (int64_t i = 0; i < tensor->size(); ++i) {
    (*tensor)[i] = near(random);
    if (i % 5 == 0)
      (*tensor)[i] = i % 2 == 0 ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int32_t>::max();
  }
}

inline void sprinkle_specials(FloatTensor* tensor, unsigned seed) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::mt19937 random(seed);
  for (int64_t i = 0; i < tensor->size(); ++i) {
    switch (random() % 40) {
      case 0: tensor->set(i, NAN); break;
      case 1: tensor->set(i, infinity); break;
      case 2: tensor->set(i, -infinity); break;
      case 3: tensor->set(i, -0.0f); break;
      case 4: tensor->set(i, 0.0f); break;
      case 5: tensor->set(i, 1e-41f); break;
      default: break;
    }
  }
}

struct Operands {
  explicit Operands(const Case& c, unsigned seed = 1)
      : x({c.T, c.D}, c.dtype),
        d_out({c.T, c.D}, c.dtype),
        rows({c.num_rows(), c.D}, c.dtype_of_rows()),
        weights({c.T, c.K}, c.weights_dtype),
        addend({c.T, c.D}, c.addend_dtype == 0 ? AB_FLOAT32 : c.addend_dtype),
        row_of_slot({c.T, c.K}),
        slot_of_row({c.num_rows()}) {
    for (FloatTensor* tensor : {&x, &d_out, &rows, &weights, &addend}) {
      tensor->fill_normal(++seed);
      if (c.specials) sprinkle_specials(tensor, seed);
    }
    if (c.garbage) {
      fill_with_garbage(&row_of_slot, c.num_rows(), seed);
      fill_with_garbage(&slot_of_row, c.T * c.K, seed + 1);
      return;
    }
    Tensor<int32_t> experts({c.T, c.K});
    std::mt19937 random(seed);
    for (int32_t& expert : experts.values()) {
      expert = static_cast<int32_t>(random() % static_cast<unsigned>(c.E + 1)) - 1;
    }
    ab_plan_args plan{};
    plan.size = sizeof(plan);
    plan.num_experts = c.E;
    plan.align_size = c.align;
    plan.experts = experts.view();
    plan.row_of_slot = row_of_slot.view();
    plan.slot_of_row = slot_of_row.view();
    EXPECT_OK(call(ab_plan, ab_plan_workspace, plan));
  }
  FloatTensor x, d_out, rows, weights, addend;
  Tensor<int32_t> row_of_slot, slot_of_row;
};

struct Results {
  explicit Results(const Case& c)
      : dispatched({c.num_rows(), c.D}, c.dtype_of_rows()),
        scaled({c.num_rows(), c.D}, c.dtype_of_gradients()),
        out({c.T, c.D}, c.dtype),
        d_x({c.T, c.D}, c.dtype_of_gradients()),
        d_rows({c.num_rows(), c.D}, c.dtype_of_gradients()),
        d_weights({c.T, c.K}, c.weights_dtype),
        d_rows_alone({c.num_rows(), c.D}, c.dtype_of_gradients()),
        d_weights_alone({c.T, c.K}, c.weights_dtype) {}
  FloatTensor dispatched, scaled, out, d_x, d_rows, d_weights, d_rows_alone, d_weights_alone;
};

// The arguments of all operations. They point to views that are owned by the operands and results, or by the mirrors.
struct Calls {
  ab_dispatch_args dispatch, scale;
  ab_combine_args combine, sum;
  ab_combine_backward_args both, d_rows, d_weights;

  // view(tensor, bytes): returns the view for the calls. bytes: element size of a float tensor, 0 for indices.
  template <class View>
  Calls(const Case& c, const Operands& in, const Results& out, const View& view) {
    const auto floats = [&](const FloatTensor& tensor) { return view(tensor.view(), tensor.element_bytes()); };
    const ab_tensor* x = floats(in.x);
    const ab_tensor* d = floats(in.d_out);
    const ab_tensor* rows = floats(in.rows);
    const ab_tensor* weights = floats(in.weights);
    const ab_tensor* given = c.weighted ? weights : nullptr;
    const ab_tensor* addend = c.addend_dtype == 0 ? nullptr : floats(in.addend);
    const ab_tensor* to = view(in.row_of_slot.view(), 0);
    const ab_tensor* from = view(in.slot_of_row.view(), 0);
    dispatch = {sizeof(dispatch), x, to, from, nullptr, floats(out.dispatched)};
    scale = {sizeof(scale), d, to, from, weights, floats(out.scaled)};
    combine = {sizeof(combine), rows, to, given, floats(out.out), addend};
    sum = {sizeof(sum), rows, to, nullptr, floats(out.d_x), addend};
    both = {sizeof(both), d, rows, to, from, given, floats(out.d_rows), floats(out.d_weights)};
    d_rows = {sizeof(d_rows), d, nullptr, to, from, given, floats(out.d_rows_alone), nullptr};
    d_weights = {sizeof(d_weights), d, rows, to, from, nullptr, nullptr, floats(out.d_weights_alone)};
  }
};

inline void run_on_cpu(const Case& c, const Operands& in, const Results& out) {
  const Calls calls(c, in, out, [](const ab_tensor* tensor, int64_t) { return tensor; });
  for (const ab_dispatch_args* args : {&calls.dispatch, &calls.scale}) EXPECT_OK(ab_dispatch(args, nullptr));
  for (const ab_combine_args* args : {&calls.combine, &calls.sum}) {
    EXPECT_OK(call(ab_combine, ab_combine_workspace, *args));
  }
  for (const ab_combine_backward_args* args : {&calls.both, &calls.d_rows, &calls.d_weights}) {
    EXPECT_OK(ab_combine_backward(args, nullptr));
  }
}

// Enqueues all operations. None needs a workspace.
inline void enqueue(const Calls& calls, cudaStream_t stream) {
  const ab_exec exec{sizeof(exec), 0, stream, nullptr, 0};
  for (const ab_dispatch_args* args : {&calls.dispatch, &calls.scale}) EXPECT_OK(ab_cuda_dispatch(args, &exec));
  for (const ab_combine_args* args : {&calls.combine, &calls.sum}) EXPECT_OK(ab_cuda_combine(args, &exec));
  for (const ab_combine_backward_args* args : {&calls.both, &calls.d_rows, &calls.d_weights}) {
    EXPECT_OK(ab_cuda_combine_backward(args, &exec));
  }
}

inline Calls calls_on_gpu(const Case& c, const Operands& in, const Results& out, Mirrors* mirrors) {
  return Calls(c, in, out,
               [&](const ab_tensor* tensor, int64_t bytes) { return mirrors->add(tensor, c.shift * bytes); });
}

inline void run_on_gpu(const Case& c, const Operands& in, const Results& out) {
  Mirrors mirrors;
  enqueue(calls_on_gpu(c, in, out, &mirrors), nullptr);
  mirrors.fetch();
}

}  // namespace anabranch::testing
