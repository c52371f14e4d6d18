// What the kernels of whole layers share: the options of a layer by number, and their arguments.
#ifndef ANABRANCH_TORCH_LAYER_ARGUMENTS_H_
#define ANABRANCH_TORCH_LAYER_ARGUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "torch/prepared.h"
#include "torch/shims.h"

namespace anabranch::torch {

// The options of a layer as the keys of operations contain them.
struct Config {
  std::string layer;    // of operations that route
  std::string network;  // of operations of the experts alone
  bool parts_first;     // see Parameters
};

// Adds the options of a layer and returns their number.
//   layer, network: the bytes in the keys of its operations (see Arguments)
//   parts_first: whether a parameter [E, P F, D] has the gate's rows first, then the up rows
int32_t add_config(const std::string& layer, const std::string& network, bool parts_first);

// The options with a number.
const Config& config_at(uint64_t number);

void check_rank(const char* name, const Tensor& tensor, int64_t rank);
void check_rank_of_w_out(const Tensor& w_out);

// Takes tensors off the stack by their kinds: T, t (optional), and for a gate G, g (optional). Tensors are contiguous,
// except the gate: a GEMM reads strides.
std::vector<Tensor> take(const Value* stack, const std::string& kinds);

// Adds a tensor to the arguments, or says that it is not given.
void add(Arguments& arguments, const Tensor& tensor);

// The operands, or instead of them the parameters of a module, which are recognised by the rank of w_in: w_in
// [E, P F, D], b_in [E, P F] and gate [E, D]. The P rows of a feature are neighbours unless parts_first.
class Parameters {
 public:
  Parameters(const Tensor& w_in, const Tensor& w_out, bool parts_first);

  // Operands from parameters.
  Tensor w_in(const Tensor& tensor) const;
  Tensor b_in(const Tensor& tensor) const;
  Tensor gate(const Tensor& tensor) const;

  // Gradients of parameters from those of operands.
  Tensor d_w_in(Tensor tensor) const;
  Tensor d_b_in(Tensor tensor) const;
  Tensor d_gate(Tensor tensor) const;

 private:
  bool are_given_;
  int64_t sizes_[3], operand_[4];
};

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_LAYER_ARGUMENTS_H_
