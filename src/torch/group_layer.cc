// The layer over the memory of peers: one operation in the forward pass and two in the backward pass. They run the
// gate's GEMMs and the calls of python/anabranch/torch/parallel/p2p_native.py.
#include "torch/group_layer.h"

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch/layer_arguments.h"
#include "torch/operations.h"
#include "torch/prepared.h"

namespace anabranch::torch {

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
  const Pass pass(stack, "TTGttttTtTtttttttttt", {X, GATE, W_IN, B_IN, W_OUT, ORDERS, CONFIG});
  Tensor logits = pass.logits();
  const int64_t shape[] = {1, static_cast<int64_t>(stack[NUM_COUNTS])};
  Tensor counts = zeros(2, shape, shims.dtype_int32(), pass[X].device_type(), pass[X].device_index());
  PassArguments arguments(pass);
  arguments.add_values({TOKENS, SMALL});
  arguments.add({X, ARRIVING});
  arguments.add(counts);
  arguments.add(logits);
  arguments.add_range(EXPERT_BIAS, BOUNDS);
  arguments.add_size(static_cast<int64_t>(stack[ROWS]));
  arguments.add_values({RANKS, RANK});
  arguments.add_rest(W_IN, pass.config().layer);
  static const int32_t number = operation_number("p2p_layer");
  std::vector<Tensor> results = run(number, arguments);
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
  const Pass pass(stack, "TTTTTTTTTtTttttttttttt", {X, -1, W_IN, B_IN, W_OUT, ORDERS, CONFIG});
  PassArguments arguments(pass);
  arguments.add_values({TOKENS, SMALL});
  arguments.add({X, D_OUTPUT, D_ARRIVING, H, X_ARRIVING});
  arguments.add_range(THERE, LORA_U);
  arguments.add_dtype(stack[W_OUT_DTYPE]);
  arguments.add_values({REQUESTED});
  arguments.add_rest(QUANTIZED, pass.config().network);
  static const int32_t number = operation_number("p2p_hidden");
  std::vector<Tensor> results = run(number, arguments);
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
  const Pass pass(stack, "TttGTTttTTTTTTTtttTtTttttttttt", {X, GATE, W_IN, B_IN, W_OUT, ORDERS, CONFIG});
  PassArguments of_logits(pass);
  of_logits.add({LOGITS, EXPERTS, MASK, LSE, D_WEIGHTS, D_SCORE_SUM, D_LSE});
  of_logits.add_dtype(pass.d_logits_dtype());
  of_logits.add_options(pass.config().layer);
  static const int32_t logits_number = operation_number("p2p_d_logits");
  auto [addend, d_gate] = pass.gate_gradients(MASKED_X, run(logits_number, of_logits)[0], NEEDS_X, NEEDS_GATE);
  PassArguments arguments(pass);
  arguments.add_values({TOKENS, SMALL});
  arguments.add({X, X_ARRIVING});
  arguments.add(addend);
  arguments.add_range(ROW_OF_SLOT, GROUP_SIZES);
  arguments.add_dtype(pass[X].dtype());  // of d_x
  arguments.add_option(std::bit_cast<Value>(static_cast<double>(stack[RANKS])));
  arguments.add_range(DH, V_IN);
  arguments.add_dtype(stack[W_IN_DTYPE]);
  arguments.add_values({REQUESTED});
  arguments.add_rest(W_IN, pass.config().network);
  static const int32_t number = operation_number("p2p_inputs");
  enum { D_X, D_W_IN, D_B_IN };
  std::vector<Tensor> results = run(number, arguments);
  results[D_W_IN] = pass.d_w_in(std::move(results[D_W_IN]));
  results[D_B_IN] = pass.d_b_in(std::move(results[D_B_IN]));
  results.push_back(std::move(d_gate));
  give(stack, results);
}

}  // namespace anabranch::torch
