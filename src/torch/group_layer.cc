// The layer over the memory of peers: one operation in the forward pass and two in the backward pass. They run the
// gate's GEMMs and the calls of python/anabranch/torch/parallel/p2p_native.py.
#include "torch/group_layer.h"

#include <bit>
#include <cstdint>
#include <initializer_list>
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
  int32_t layer = operation_number("p2p_layer");
  int32_t d_logits = operation_number("p2p_d_logits");
  int32_t hidden = operation_number("p2p_hidden");
  int32_t inputs = operation_number("p2p_inputs");
};

const Numbers& numbers() {
  static const Numbers numbers;
  return numbers;
}

void add_all(Arguments& arguments, const std::vector<Tensor>& tensors, std::initializer_list<int> indices) {
  for (int i : indices) add(arguments, tensors[i]);
}

// Adds the arguments from `first` to `last`.
void add_range(Arguments& arguments, const std::vector<Tensor>& tensors, int first, int last) {
  for (int i = first; i <= last; ++i) add(arguments, tensors[i]);
}

void give(Value* stack, std::vector<Tensor>& results) {
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].release_value();
}

}  // namespace

void group_forward(Value* stack, uint64_t, uint64_t) {
  enum {
    X,
    ARRIVING,
    GATE,
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
    NUM_COUNTS,
    ROWS,
    RANKS,
    RANK,
    TOKENS,
    SMALL,
    CONFIG,
  };
  std::vector<Tensor> t = take(stack, "TTGttttTtTtttttttttt");
  check_rank("x", t[X], 2);
  check_rank("gate", t[GATE], 2);
  check_rank_of_w_out(t[W_OUT]);
  const Config& config = config_at(stack[CONFIG]);
  const Parameters parameters(t[W_IN], t[W_OUT], config.parts_first);
  t[W_IN] = parameters.w_in(t[W_IN]);
  t[B_IN] = parameters.b_in(t[B_IN]);
  Tensor logits = gate_logits(t[X], parameters.gate(t[GATE]));
  const int64_t shape[] = {1, static_cast<int64_t>(stack[NUM_COUNTS])};
  Tensor counts = zeros(2, shape, shims.dtype_int32(), t[X].device_type(), t[X].device_index());
  Arguments arguments;
  arguments.add_option(stack[TOKENS]);
  arguments.add_option(stack[SMALL]);
  add_all(arguments, t, {X, ARRIVING});
  arguments.add(counts);
  arguments.add(logits);
  add_range(arguments, t, EXPERT_BIAS, BOUNDS);
  arguments.add_size(static_cast<int64_t>(stack[ROWS]));
  for (int i : {RANKS, RANK}) arguments.add_option(stack[i]);
  add_range(arguments, t, W_IN, COPIES);
  arguments.add_option(stack[ORDERS]);
  arguments.add_options(config.layer);
  std::vector<Tensor> results = run(numbers().layer, arguments);
  results.push_back(std::move(counts));
  results.push_back(std::move(logits));
  give(stack, results);
}

void group_hidden(Value* stack, uint64_t, uint64_t) {
  enum {
    D_OUTPUT,
    D_ARRIVING,
    X,
    X_ARRIVING,
    H,
    THERE,
    SLOT_OF_ROW,
    GROUP_SIZES,
    W_IN,
    B_IN,
    W_OUT,
    B_OUT,
    LORA_U,
    QUANTIZED,
    FACTORS = QUANTIZED + 4,
    COPIES = FACTORS + 4,
    ORDERS,
    W_OUT_DTYPE,
    REQUESTED,
    TOKENS,
    SMALL,
    CONFIG,
  };
  std::vector<Tensor> t = take(stack, "TTTTTTTTTtTttttttttttt");
  check_rank_of_w_out(t[W_OUT]);
  const Config& config = config_at(stack[CONFIG]);
  const Parameters parameters(t[W_IN], t[W_OUT], config.parts_first);
  t[W_IN] = parameters.w_in(t[W_IN]);
  t[B_IN] = parameters.b_in(t[B_IN]);
  Arguments arguments;
  arguments.add_option(stack[TOKENS]);
  arguments.add_option(stack[SMALL]);
  add_all(arguments, t, {X, D_OUTPUT, D_ARRIVING, H, X_ARRIVING});
  add_range(arguments, t, THERE, LORA_U);
  arguments.add_option(static_cast<int8_t>(stack[W_OUT_DTYPE]));
  arguments.add_option(stack[REQUESTED]);
  add_range(arguments, t, QUANTIZED, COPIES);
  arguments.add_option(stack[ORDERS]);
  arguments.add_options(config.network);
  std::vector<Tensor> results = run(numbers().hidden, arguments);
  give(stack, results);
}

void group_inputs(Value* stack, uint64_t, uint64_t) {
  enum {
    D_WEIGHTS,
    D_SCORE_SUM,
    D_LSE,
    GATE,
    LOGITS,
    EXPERTS,
    MASK,
    LSE,
    MASKED_X,
    X,
    X_ARRIVING,
    ROW_OF_SLOT,
    SLOT_OF_ROW,
    GROUP_SIZES,
    DH,
    DH_Q,
    DH_SCALES,
    V_IN,
    W_IN,
    B_IN,
    W_OUT,
    QUANTIZED,
    FACTORS = QUANTIZED + 4,
    COPIES = FACTORS + 4,
    ORDERS,
    RANKS,
    W_IN_DTYPE,
    REQUESTED,
    NEEDS_X,
    NEEDS_GATE,
    TOKENS,
    SMALL,
    CONFIG,
  };
  std::vector<Tensor> t = take(stack, "TttGTTttTTTTTTTtttTtTttttttttt");
  check_rank("x", t[X], 2);
  check_rank("gate", t[GATE], 2);
  check_rank_of_w_out(t[W_OUT]);
  const Config& config = config_at(stack[CONFIG]);
  const Parameters parameters(t[W_IN], t[W_OUT], config.parts_first);
  t[W_IN] = parameters.w_in(t[W_IN]);
  t[B_IN] = parameters.b_in(t[B_IN]);
  Arguments arguments;
  add_all(arguments, t, {LOGITS, EXPERTS, MASK, LSE, D_WEIGHTS, D_SCORE_SUM, D_LSE});
  // The gate's GEMMs multiply bfloat16 operands on a GPU.
  arguments.add_option(static_cast<int8_t>(t[X].on_cuda() ? t[X].dtype() : shims.dtype_float32()));
  arguments.add_options(config.layer);
  const Tensor d_logits = std::move(run(numbers().d_logits, arguments)[0]);
  Tensor addend, d_gate;
  std::tie(addend, d_gate) = gate_backward(t[MASKED_X], parameters.gate(t[GATE]), d_logits, (stack[NEEDS_X] & 1) != 0,
                                           (stack[NEEDS_GATE] & 1) != 0);
  if (d_gate) d_gate = parameters.d_gate(to_dtype(d_gate, t[GATE].dtype()));
  arguments = Arguments();
  arguments.add_option(stack[TOKENS]);
  arguments.add_option(stack[SMALL]);
  add_all(arguments, t, {X, X_ARRIVING});
  add(arguments, addend);
  add_range(arguments, t, ROW_OF_SLOT, GROUP_SIZES);
  arguments.add_option(static_cast<int8_t>(t[X].dtype()));  // of d_x
  arguments.add_option(std::bit_cast<Value>(static_cast<double>(stack[RANKS])));
  add_range(arguments, t, DH, V_IN);
  arguments.add_option(static_cast<int8_t>(stack[W_IN_DTYPE]));
  arguments.add_option(stack[REQUESTED]);
  add_range(arguments, t, W_IN, COPIES);
  arguments.add_option(stack[ORDERS]);
  arguments.add_options(config.network);
  enum { D_X, D_W_IN, D_B_IN };
  std::vector<Tensor> results = run(numbers().inputs, arguments);
  results[D_W_IN] = parameters.d_w_in(std::move(results[D_W_IN]));
  results[D_B_IN] = parameters.d_b_in(std::move(results[D_B_IN]));
  results.push_back(std::move(d_gate));
  give(stack, results);
}

}  // namespace anabranch::torch
