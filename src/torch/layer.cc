// The whole layer's forward and backward pass as one operation each: the gate's GEMMs, if there is a gate, and the
// calls of python/anabranch/torch/ops/packed_ops.py.
#include "torch/layer.h"

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/layer_arguments.h"
#include "torch/operations.h"
#include "torch/prepared.h"

namespace anabranch::torch {

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
  const Pass pass(stack, "TgttttttTtTtttttttttt", {X, GATE, W_IN, B_IN, W_OUT, ORDERS, CONFIG});
  Tensor logits;
  if (pass[GATE]) logits = pass.logits();
  PassArguments arguments(pass);
  arguments.add({X});
  arguments.add(logits);
  arguments.add_rest(WEIGHTS, pass.config().layer);
  enum { DROPPED = 2 };
  static const int32_t number = operation_number("packed_layer");
  std::vector<Tensor> results = run(number, arguments);
  const int64_t one = 1;
  const Tensor dropped = std::move(results[DROPPED]);  // the number, and two zeros
  results[DROPPED] = viewed(dropped, 0, nullptr);
  results.push_back(std::move(logits));
  results.push_back(viewed(dropped, 1, &one));
  for (int64_t i : {1, 2}) results.push_back(viewed(view_as(dropped, shims.dtype_float32()), 0, nullptr, i));
  give(stack, results);
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
  const Pass pass(stack, "TtttgTTTtttTttTtTtttttttttt", {TOKENS, GATE, W_IN, B_IN, W_OUT, ORDERS, CONFIG});
  const bool routes = static_cast<bool>(pass[GATE]);
  PassArguments arguments(pass);
  arguments.add({D_OUTPUT});
  if (!routes) {
    arguments.add_none();  // d_output, quantised
    arguments.add_none();  // its scales
  }
  arguments.add({H, X, WEIGHTS, MAPS, W_IN, B_IN, W_OUT, B_OUT, LORA_U});
  if (routes) {
    arguments.add({LOGITS, EXPERTS, MASK, LSE, D_SCORE_SUM, D_LSE});
    arguments.add_dtype(pass.d_logits_dtype());
  }
  arguments.add_dtype(stack[W_OUT_DTYPE]);
  arguments.add_values({REQUESTED});
  arguments.add_rest(QUANTIZED, routes ? pass.config().layer : pass.config().network);
  // packed_experts_hidden has the results of packed_layer_hidden, and the gradient of the weights in addition.
  static const int32_t layer_hidden = operation_number("packed_layer_hidden");
  static const int32_t experts_hidden = operation_number("packed_experts_hidden");
  std::vector<Tensor> hidden = run(routes ? layer_hidden : experts_hidden, arguments);
  Tensor d_weights, addend, d_gate;
  if (!routes) {
    d_weights = std::move(hidden[3]);
    hidden.erase(hidden.begin() + 3);
  }
  enum { DH, D_W_OUT, D_B_OUT, DH_Q, DH_SCALES, V_IN, D_A_IN, D_B_FACTOR_IN, D_A_OUT, D_B_FACTOR_OUT, D_LOGITS };
  if (routes) std::tie(addend, d_gate) = pass.gate_gradients(TOKENS, hidden[D_LOGITS], NEEDS_X, NEEDS_GATE);
  enum { D_X, D_W_IN, D_B_IN, NUM_INPUTS };
  std::vector<Tensor> inputs(NUM_INPUTS);
  if (hidden[DH]) {
    PassArguments of_inputs(pass);
    for (int i : {DH, DH_Q, DH_SCALES}) of_inputs.add(hidden[i]);
    of_inputs.add({X});
    of_inputs.add(addend);
    of_inputs.add({MAPS, W_IN, B_IN, W_OUT});
    of_inputs.add(hidden[V_IN]);
    of_inputs.add_dtype(stack[W_IN_DTYPE]);
    of_inputs.add_dtype(pass[X].dtype());  // of d_x
    of_inputs.add_values({REQUESTED});
    of_inputs.add_rest(QUANTIZED, pass.config().network);
    static const int32_t experts_inputs = operation_number("packed_experts_inputs");
    inputs = run(experts_inputs, of_inputs);
  }
  Tensor d_w_in = pass.d_w_in(std::move(inputs[D_W_IN])), d_b_in = pass.d_b_in(std::move(inputs[D_B_IN]));
  int i = 0;
  for (Tensor* result : {&inputs[D_X], &d_w_in, &d_b_in, &hidden[D_W_OUT], &hidden[D_B_OUT], &d_gate, &d_weights,
                         &hidden[D_A_IN], &hidden[D_B_FACTOR_IN], &hidden[D_A_OUT], &hidden[D_B_FACTOR_OUT]}) {
    stack[i++] = result->release_value();
  }
}

}  // namespace anabranch::torch
