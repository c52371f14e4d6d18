// What the kernels of whole layers share: the options of a layer by number, their arguments, and those of operations.
#ifndef ANABRANCH_TORCH_LAYER_ARGUMENTS_H_
#define ANABRANCH_TORCH_LAYER_ARGUMENTS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "torch/prepared.h"
#include "torch/shims.h"

namespace anabranch::torch {

// The options of a layer as the keys of operations contain them.
struct Config {
  std::string layer;    // of operations that route
  std::string network;  // of operations of the experts alone
  bool parts_first;     // see Pass
};

// Adds the options of a layer and returns their number.
//   layer, network: the bytes in the keys of its operations (see Arguments)
//   parts_first: whether a parameter [E, P F, D] has the gate's rows first, then the up rows
int32_t add_config(const std::string& layer, const std::string& network, bool parts_first);

// The arguments of a kernel. They are operands, or instead of them the parameters of a module, which are recognised by
// the rank of w_in: w_in [E, P F, D], b_in [E, P F] and gate [E, D]. The P rows of a feature are neighbours unless
// Config::parts_first.
class Pass {
 public:
  // Indices of arguments.
  struct Places {
    int x, gate;  // gate: -1 if the kernel has none
    int w_in, b_in, w_out, orders, config;
  };

  // Takes the tensors off the stack. kinds: T, t (optional), and for a gate G, g (optional). Tensors are made
  // contiguous, except the gate: a GEMM reads strides.
  Pass(const Value* stack, const std::string& kinds, const Places& places);

  // Operands, also where parameters are given, except the gate.
  const Tensor& operator[](int i) const { return tensors_[i]; }
  Value value(int i) const { return stack_[i]; }
  const Places& places() const { return places_; }
  const Config& config() const { return config_; }

  // x gate.
  Tensor logits() const;
  // On a GPU the gate's GEMMs multiply bfloat16 operands.
  int32_t d_logits_dtype() const;
  // The gradients of x and of the gate; NULL if the argument needs_x, or needs_gate, is false.
  std::pair<Tensor, Tensor> gate_gradients(int x, const Tensor& d_logits, int needs_x, int needs_gate) const;

  // Gradients of parameters from those of operands.
  Tensor d_w_in(Tensor tensor) const;
  Tensor d_b_in(Tensor tensor) const;

 private:
  Tensor gate() const;
  void view_parameters();

  const Value* stack_;
  Places places_;
  std::vector<Tensor> tensors_;
  const Config& config_;
  bool are_parameters_ = false;
  int64_t sizes_[3], operand_[4];
};

// The arguments of an operation of a pass, in order. Indices are those of the kernel's arguments.
class PassArguments : public Arguments {
 public:
  explicit PassArguments(const Pass& pass) : pass_(pass) {}

  using Arguments::add;
  void add(std::initializer_list<int> indices);
  void add_range(int first, int last);
  void add_values(std::initializer_list<int> indices);
  void add_dtype(Value dtype) { add_option(static_cast<int8_t>(dtype)); }
  // The tensors from `first` to the orders of axes, these orders, and the options.
  void add_rest(int first, const std::string& options);

 private:
  const Pass& pass_;
};

// Makes tensors the results of a kernel.
void give(Value* stack, std::vector<Tensor>& results);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_LAYER_ARGUMENTS_H_
