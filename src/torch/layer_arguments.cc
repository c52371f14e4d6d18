#include "torch/layer_arguments.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

#include "torch/gate.h"
#include "torch/operations.h"

namespace anabranch::torch {

namespace {

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

void check_rank(const char* name, const Tensor& tensor, int64_t rank) {
  if (tensor && tensor.rank() != rank) {
    fail(AB_INVALID_ARGUMENT, std::string(name) + ": got a tensor of rank " + std::to_string(tensor.rank()) +
                                  ", expected " + std::to_string(rank));
  }
}

std::vector<Tensor> take(const Value* stack, const std::string& kinds) {
  std::vector<Tensor> tensors(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    tensors[i] = take_tensor(stack[i], kinds[i] == 'T' || kinds[i] == 'G' ? 'T' : 't');
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const bool is_gate = kinds[i] == 'g' || kinds[i] == 'G';
    if (tensors[i] && !is_gate) tensors[i] = contiguous(std::move(tensors[i]));
  }
  return tensors;
}

}  // namespace

int32_t add_config(const std::string& layer, const std::string& network, bool parts_first) {
  return configs().add({layer, network, parts_first});
}

Pass::Pass(const Value* stack, const std::string& kinds, const Places& places)
    : stack_(stack), places_(places), tensors_(take(stack, kinds)), config_(configs().at(stack[places.config])) {
  check_rank("x", tensors_[places.x], 2);
  if (places.gate >= 0) check_rank("gate", tensors_[places.gate], 2);
  const Tensor& w_out = tensors_[places.w_out];
  // The codes of packed weights have one more axis than the weights.
  check_rank("w_out", w_out, w_out.dtype() == shims.dtype_uint8() ? 4 : 3);
  if (tensors_[places.w_in].rank() == 3) view_parameters();
}

void Pass::view_parameters() {
  Tensor &w_in = tensors_[places_.w_in], &b_in = tensors_[places_.b_in];
  const Tensor& w_out = tensors_[places_.w_out];
  check_rank("w_out", w_out, 3);
  std::copy_n(w_in.sizes(), 3, sizes_);
  const int64_t F = w_out.sizes()[2], P = F == 0 ? 1 : sizes_[1] / F;
  if (P * F != sizes_[1]) {
    fail(AB_INVALID_ARGUMENT, "w_in: got " + std::to_string(sizes_[1]) + " rows, expected a multiple of " +
                                  std::to_string(F) + ", the last axis of w_out");
  }
  const int64_t operand[] = {sizes_[0], config_.parts_first ? P : F, config_.parts_first ? F : P, sizes_[2]};
  std::copy_n(operand, 4, operand_);
  check_rank("b_in", b_in, 2);
  if (b_in && (b_in.sizes()[0] != sizes_[0] || b_in.sizes()[1] != sizes_[1])) {
    fail(AB_INVALID_ARGUMENT, "b_in: got another shape than the first two axes of w_in, expected the same");
  }
  w_in = viewed(w_in, 4, operand_);
  if (b_in) b_in = viewed(b_in, 3, operand_);
  are_parameters_ = true;
}

Tensor Pass::gate() const {
  const Tensor& tensor = tensors_[places_.gate];
  return are_parameters_ ? transposed(tensor) : tensor.share();
}

Tensor Pass::logits() const { return gate_logits(tensors_[places_.x], gate()); }

int32_t Pass::d_logits_dtype() const {
  const Tensor& x = tensors_[places_.x];
  return x.on_cuda() ? x.dtype() : shims.dtype_float32();
}

std::pair<Tensor, Tensor> Pass::gate_gradients(int x, const Tensor& d_logits, int needs_x, int needs_gate) const {
  auto gradients =
      gate_backward(tensors_[x], gate(), d_logits, (stack_[needs_x] & 1) != 0, (stack_[needs_gate] & 1) != 0);
  Tensor& d_gate = gradients.second;
  if (d_gate) d_gate = to_dtype(d_gate, tensors_[places_.gate].dtype());
  if (d_gate && are_parameters_) d_gate = transposed(d_gate);
  return gradients;
}

Tensor Pass::d_w_in(Tensor tensor) const {
  return are_parameters_ && tensor ? viewed(tensor, 3, sizes_) : std::move(tensor);
}

Tensor Pass::d_b_in(Tensor tensor) const {
  return are_parameters_ && tensor ? viewed(tensor, 2, sizes_) : std::move(tensor);
}

void PassArguments::add(std::initializer_list<int> indices) {
  for (int i : indices) add(pass_[i]);
}

void PassArguments::add_range(int first, int last) {
  for (int i = first; i <= last; ++i) add(pass_[i]);
}

void PassArguments::add_values(std::initializer_list<int> indices) {
  for (int i : indices) add_option(pass_.value(i));
}

void PassArguments::add_rest(int first, const std::string& options) {
  const int orders = pass_.places().orders;
  add_range(first, orders - 1);
  add_values({orders});
  add_options(options);
}

void give(Value* stack, std::vector<Tensor>& results) {
  for (size_t i = 0; i < results.size(); ++i) stack[i] = results[i].release_value();
}

}  // namespace anabranch::torch
