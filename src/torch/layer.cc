// The whole layer's forward and backward pass as one operation each: the gate's GEMMs, if there is a gate, and the
// calls of python/anabranch/torch/ops/packed_ops.py.
#include "torch/layer.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/blas.h"
#include "torch/operations.h"
#include "torch/phase_range.h"
#include "torch/prepared.h"

namespace anabranch::torch {

namespace {

// The options of a layer as the keys of operations contain them.
struct Config {
  std::string layer;    // of packed_layer and packed_layer_hidden
  std::string network;  // of packed_experts_hidden and packed_experts_inputs
  bool parts_first;     // see Parameters
};

// The configs by number. One thread may add a config while others run.
class Configs {
 public:
  int32_t add(Config config) {
    std::lock_guard lock(mutex_);
    configs_.push_back(std::move(config));
    return static_cast<int32_t>(configs_.size()) - 1;
  }
  const Config& at(uint64_t number) {
    std::lock_guard lock(mutex_);
    if (number >= configs_.size())
      fail(AB_INVALID_ARGUMENT, "config: got an unknown number, expected one of this process");
    return configs_[number];  // a deque does not move its elements
  }

 private:
  std::mutex mutex_;
  std::deque<Config> configs_;
};

Configs& configs() {
  static auto* configs = new Configs;  // never destroyed: Python may end first
  return *configs;
}

struct Numbers {
  int32_t layer = operation_number("packed_layer");
  int32_t layer_hidden = operation_number("packed_layer_hidden");
  int32_t experts_hidden = operation_number("packed_experts_hidden");
  int32_t experts_inputs = operation_number("packed_experts_inputs");
  int32_t grouped_matmul = operation_number("grouped_matmul");
  int32_t grouped_matmul_dw = operation_number("grouped_matmul_dw");
};

const Numbers& numbers() {
  static const Numbers numbers;
  return numbers;
}

void check_rank(const char* name, const Tensor& tensor, int64_t rank) {
  if (tensor && tensor.rank() != rank) {
    fail(AB_INVALID_ARGUMENT, std::string(name) + ": got a tensor of rank " + std::to_string(tensor.rank()) +
                                  ", expected " + std::to_string(rank));
  }
}

// The codes of packed weights have one more axis than the weights.
void check_rank_of_w_out(const Tensor& w_out) {
  check_rank("w_out", w_out, w_out.dtype() == shims.dtype_uint8() ? 4 : 3);
}

// Adds a tensor to the arguments, or says that it is not given.
void add(Arguments& arguments, const Tensor& tensor) {
  if (tensor) {
    arguments.add(tensor);
  } else {
    arguments.add_none();
  }
}

// The operands, or instead of them the parameters of a module, which are recognised by the rank of w_in: w_in
// [E, P F, D], b_in [E, P F] and gate [E, D]. The P rows of a feature are neighbours unless parts_first.
class Parameters {
 public:
  Parameters(const Tensor& w_in, const Tensor& w_out, bool parts_first) : are_given_(w_in.rank() == 3) {
    if (!are_given_) return;
    check_rank("w_out", w_out, 3);
    std::copy_n(w_in.sizes(), 3, sizes_);
    const int64_t F = w_out.sizes()[2], P = F == 0 ? 1 : sizes_[1] / F;
    if (P * F != sizes_[1]) {
      fail(AB_INVALID_ARGUMENT, "w_in: got " + std::to_string(sizes_[1]) + " rows, expected a multiple of " +
                                    std::to_string(F) + ", the last axis of w_out");
    }
    const int64_t operand[] = {sizes_[0], parts_first ? P : F, parts_first ? F : P, sizes_[2]};
    std::copy_n(operand, 4, operand_);
  }

  // Operands from parameters.
  Tensor w_in(const Tensor& tensor) const { return are_given_ ? viewed(tensor, 4, operand_) : tensor.share(); }
  Tensor b_in(const Tensor& tensor) const {
    if (!tensor) return Tensor();
    if (!are_given_) return tensor.share();
    check_rank("b_in", tensor, 2);
    if (tensor.sizes()[0] != sizes_[0] || tensor.sizes()[1] != sizes_[1]) {
      fail(AB_INVALID_ARGUMENT, "b_in: got another shape than the first two axes of w_in, expected the same");
    }
    return viewed(tensor, 3, operand_);
  }
  Tensor gate(const Tensor& tensor) const { return are_given_ ? transposed(tensor) : tensor.share(); }

  // Gradients of parameters from those of operands.
  Tensor d_w_in(Tensor tensor) const { return are_given_ && tensor ? viewed(tensor, 3, sizes_) : std::move(tensor); }
  Tensor d_b_in(Tensor tensor) const { return are_given_ && tensor ? viewed(tensor, 2, sizes_) : std::move(tensor); }
  Tensor d_gate(Tensor tensor) const { return are_given_ ? transposed(tensor) : std::move(tensor); }

 private:
  bool are_given_;
  int64_t sizes_[3], operand_[4];
};

// Takes tensors off the stack by their kinds: T, t (optional), or g for an optional gate. Tensors are contiguous,
// except the gate: a GEMM reads strides.
std::vector<Tensor> take(const Value* stack, const std::string& kinds) {
  std::vector<Tensor> tensors(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) tensors[i] = take_tensor(stack[i], kinds[i] == 'T' ? 'T' : 't');
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (tensors[i] && kinds[i] != 'g') tensors[i] = contiguous(std::move(tensors[i]));
  }
  return tensors;
}

// The gate's GEMMs, in the same way as layer/gate.py. A CPU multiplies in float32 by the library's grouped GEMM; a GPU
// multiplies operands of one dtype, float32 or bfloat16, by cuBLAS. layer/native_passes.py excludes other dtypes there.

// int32 [1] that holds the number of rows.
Tensor one_group(const Tensor& rows) {
  const int64_t one = 1;
  Tensor sizes = empty(1, &one, shims.dtype_int32(), rows.device_type(), rows.device_index());
  *static_cast<int32_t*>(sizes.data()) = static_cast<int32_t>(rows.sizes()[0]);
  return sizes;
}

// rows [T, M] times matrix [M, N], float32.
Tensor rows_on_cpu(const Tensor& given_rows, const Tensor& given_matrix) {
  const int32_t float32 = shims.dtype_float32();
  const Tensor rows = contiguous(to_dtype(given_rows, float32)), matrix = to_dtype(given_matrix, float32);
  const bool transpose = !is_contiguous(matrix);
  const Tensor stored = contiguous(transpose ? transposed(matrix) : matrix.share());
  const int64_t shape[] = {1, stored.sizes()[0], stored.sizes()[1]};
  const Tensor w = viewed(stored, 3, shape), sizes = one_group(rows);
  Arguments arguments;
  for (const Tensor* operand : {&rows, &w, &sizes}) arguments.add(*operand);
  arguments.add_option(static_cast<int8_t>(transpose));
  arguments.add_option(Value{0});  // precision "highest"
  arguments.add_option(Value{0});  // fp8_scales
  return std::move(run(numbers().grouped_matmul, arguments)[0]);
}

// x^T d_logits [D, E], float32.
Tensor gradient_on_cpu(const Tensor& given_x, const Tensor& d_logits) {
  const int32_t float32 = shims.dtype_float32();
  const Tensor x = contiguous(to_dtype(given_x, float32)), sizes = one_group(x);
  Arguments arguments;
  for (const Tensor* operand : {&x, &d_logits, &sizes}) arguments.add(*operand);
  arguments.add_option(static_cast<int8_t>(float32));
  arguments.add_option(Value{0});   // precision "highest"
  arguments.add_option(int8_t{0});  // one matrix per expert
  const Tensor product = std::move(run(numbers().grouped_matmul_dw, arguments)[0]);
  // product is [1, D, E].
  return viewed(product, 2, product.sizes() + 1);
}

Tensor gate_logits(const Tensor& x, const Tensor& gate) {
  const PhaseRange range("anabranch/gate");
  if (!x.on_cuda()) return rows_on_cpu(x, gate);
  return multiply(x, gate, shims.dtype_float32());
}

// d_x in the dtype of x, and d_gate in float32; an empty tensor if it is not requested. On a GPU d_logits has the dtype
// of x.
std::pair<Tensor, Tensor> gate_backward(const Tensor& x, const Tensor& gate, const Tensor& d_logits, bool needs_x,
                                        bool needs_gate) {
  const PhaseRange range("anabranch/gate_backward");
  std::pair<Tensor, Tensor> gradients;
  if (!x.on_cuda()) {
    if (needs_x) gradients.first = to_dtype(rows_on_cpu(d_logits, transposed(gate)), x.dtype());
    if (needs_gate) gradients.second = gradient_on_cpu(x, d_logits);
    return gradients;
  }
  if (needs_x) gradients.first = multiply(d_logits, transposed(gate), x.dtype());
  if (needs_gate) gradients.second = multiply(transposed(x), d_logits, shims.dtype_float32());
  return gradients;
}

}  // namespace

int32_t add_config(const std::string& layer, const std::string& network, bool parts_first) {
  return configs().add({layer, network, parts_first});
}

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
  const Config& config = configs().at(stack[CONFIG]);
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
  const Config& config = configs().at(stack[CONFIG]);
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
