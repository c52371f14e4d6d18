// The whole layer's forward and backward pass as one operation each: the gate's GEMMs, if there is a gate, and the
// calls of python/anabranch/torch/ops/packed_ops.py.
#include "torch/layer.h"

#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/gate.h"
#include "torch/layer_arguments.h"
#include "torch/operations.h"
#include "torch/prepared.h"

namespace anabranch::torch {

namespace {

struct Numbers {
  int32_t layer = operation_number("packed_layer");
  int32_t layer_hidden = operation_number("packed_layer_hidden");
  int32_t experts_hidden = operation_number("packed_experts_hidden");
  int32_t experts_inputs = operation_number("packed_experts_inputs");
};

const Numbers& numbers() {
  static const Numbers numbers;
  return numbers;
}

}  // namespace

void layer_forward(Value* stack, uint64_t, uint64_t) {
  enum {
    X,
    GATE,
    WEIGHTS,
    EXPERTS,
    EXPERT_BIAS,
    MASK,
    FORCED,
    BOUNDS,
    W_IN,
    B_IN,
    W_OUT,
    B_OUT,
    QUANTIZED,
    FACTORS = QUANTIZED + 4,
    COPIES = FACTORS + 4,
    ORDERS,
    CONFIG
  };
  std::vector<Tensor> t = take(stack, "TgttttttTtTtttttttttt");
  check_rank("x", t[X], 2);
  check_rank("gate", t[GATE], 2);
  check_rank_of_w_out(t[W_OUT]);
  const Config& config = config_at(stack[CONFIG]);
  const Parameters parameters(t[W_IN], t[W_OUT], config.parts_first);
  t[W_IN] = parameters.w_in(t[W_IN]);
  t[B_IN] = parameters.b_in(t[B_IN]);
  Tensor logits;
  if (t[GATE]) logits = gate_logits(t[X], parameters.gate(t[GATE]));
  Arguments arguments;
  arguments.add(t[X]);
  add(arguments, logits);
  for (int i = WEIGHTS; i < ORDERS; ++i) add(arguments, t[i]);
  arguments.add_option(stack[ORDERS]);
  arguments.add_options(config.layer);
  enum { DROPPED = 2 };
  std::vector<Tensor> results = run(numbers().layer, arguments);
  const int64_t one = 1;
  const Tensor dropped = std::move(results[DROPPED]);  // the number, and a zero
  results[DROPPED] = viewed(dropped, 0, nullptr);
  results.push_back(std::move(logits));
  results.push_back(viewed(dropped, 1, &one));
  results.push_back(viewed(view_as(dropped, shims.dtype_float32()), 0, nullptr, 1));
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].release_value();
}

void layer_backward(Value* stack, uint64_t, uint64_t) {
  enum {
    D_OUTPUT,
    D_SCORE_SUM,
    D_LSE,
    TOKENS,
    GATE,
    X,
    W_IN,
    W_OUT,
    B_IN,
    B_OUT,
    MASK,
    WEIGHTS,
    EXPERTS,
    LSE,
    H,
    LOGITS,
    MAPS,
    LORA_U,
    QUANTIZED,
    FACTORS = QUANTIZED + 4,
    COPIES = FACTORS + 4,
    ORDERS,
    W_IN_DTYPE,
    W_OUT_DTYPE,
    REQUESTED,
    NEEDS_X,
    NEEDS_GATE,
    CONFIG,
  };
  std::vector<Tensor> t = take(stack, "TtttgTTTtttTttTtTtttttttttt");
  check_rank("tokens", t[TOKENS], 2);
  check_rank("gate", t[GATE], 2);
  check_rank_of_w_out(t[W_OUT]);
  const Config& config = config_at(stack[CONFIG]);
  const Parameters parameters(t[W_IN], t[W_OUT], config.parts_first);
  t[W_IN] = parameters.w_in(t[W_IN]);
  t[B_IN] = parameters.b_in(t[B_IN]);
  const bool routes = static_cast<bool>(t[GATE]);
  const auto add_all = [&t](Arguments& arguments, std::initializer_list<int> indices) {
    for (int i : indices) add(arguments, t[i]);
  };
  const auto add_options = [&t, stack](Arguments& arguments, const std::string& options) {
    arguments.add_option(stack[REQUESTED]);
    for (int i = QUANTIZED; i < ORDERS; ++i) add(arguments, t[i]);
    arguments.add_option(stack[ORDERS]);
    arguments.add_options(options);
  };
  Arguments arguments;
  arguments.add(t[D_OUTPUT]);
  if (!routes) {
    arguments.add_none();  // d_output, quantised
    arguments.add_none();  // its scales
  }
  add_all(arguments, {H, X, WEIGHTS, MAPS, W_IN, B_IN, W_OUT, B_OUT, LORA_U});
  if (routes) {
    add_all(arguments, {LOGITS, EXPERTS, MASK, LSE, D_SCORE_SUM, D_LSE});
    // The gate's GEMMs multiply bfloat16 operands on a GPU.
    arguments.add_option(static_cast<int8_t>(t[X].on_cuda() ? t[X].dtype() : shims.dtype_float32()));
  }
  arguments.add_option(static_cast<int8_t>(stack[W_OUT_DTYPE]));
  add_options(arguments, routes ? config.layer : config.network);
  // packed_experts_hidden has the results of packed_layer_hidden, and the gradient of the weights in addition.
  std::vector<Tensor> hidden = run(routes ? numbers().layer_hidden : numbers().experts_hidden, arguments);
  Tensor d_weights, addend, d_gate;
  if (!routes) {
    d_weights = std::move(hidden[3]);
    hidden.erase(hidden.begin() + 3);
  }
  enum { DH, D_W_OUT, D_B_OUT, DH_Q, DH_SCALES, V_IN, D_A_IN, D_B_FACTOR_IN, D_A_OUT, D_B_FACTOR_OUT, D_LOGITS };
  if (routes) {
    std::tie(addend, d_gate) = gate_backward(t[TOKENS], parameters.gate(t[GATE]), hidden[D_LOGITS],
                                             (stack[NEEDS_X] & 1) != 0, (stack[NEEDS_GATE] & 1) != 0);
    if (d_gate) d_gate = parameters.d_gate(to_dtype(d_gate, t[GATE].dtype()));
  }
  enum { D_X, D_W_IN, D_B_IN, NUM_INPUTS };
  std::vector<Tensor> inputs(NUM_INPUTS);
  if (hidden[DH]) {
    arguments = Arguments();
    for (const Tensor* tensor : {&hidden[DH], &hidden[DH_Q], &hidden[DH_SCALES], &t[X], &addend}) {
      add(arguments, *tensor);
    }
    add_all(arguments, {MAPS, W_IN, B_IN, W_OUT});
    add(arguments, hidden[V_IN]);
    arguments.add_option(static_cast<int8_t>(stack[W_IN_DTYPE]));
    arguments.add_option(static_cast<int8_t>(t[X].dtype()));  // of d_x
    add_options(arguments, config.network);
    inputs = run(numbers().experts_inputs, arguments);
  }
  Tensor d_w_in = parameters.d_w_in(std::move(inputs[D_W_IN])), d_b_in = parameters.d_b_in(std::move(inputs[D_B_IN]));
  int i = 0;
  for (Tensor* result : {&inputs[D_X], &d_w_in, &d_b_in, &hidden[D_W_OUT], &hidden[D_B_OUT], &d_gate, &d_weights,
                         &hidden[D_A_IN], &hidden[D_B_FACTOR_IN], &hidden[D_A_OUT], &hidden[D_B_FACTOR_OUT]}) {
    stack[i++] = result->release_value();
  }
}

}  // namespace anabranch::torch
