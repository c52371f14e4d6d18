#include "torch/layer_arguments.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

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

}  // namespace

int32_t add_config(const std::string& layer, const std::string& network, bool parts_first) {
  return configs().add({layer, network, parts_first});
}

const Config& config_at(uint64_t number) { return configs().at(number); }

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

void add(Arguments& arguments, const Tensor& tensor) {
  if (tensor) {
    arguments.add(tensor);
  } else {
    arguments.add_none();
  }
}

Parameters::Parameters(const Tensor& w_in, const Tensor& w_out, bool parts_first) : are_given_(w_in.rank() == 3) {
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

Tensor Parameters::w_in(const Tensor& tensor) const {
  return are_given_ ? viewed(tensor, 4, operand_) : tensor.share();
}

Tensor Parameters::b_in(const Tensor& tensor) const {
  if (!tensor) return Tensor();
  if (!are_given_) return tensor.share();
  check_rank("b_in", tensor, 2);
  if (tensor.sizes()[0] != sizes_[0] || tensor.sizes()[1] != sizes_[1]) {
    fail(AB_INVALID_ARGUMENT, "b_in: got another shape than the first two axes of w_in, expected the same");
  }
  return viewed(tensor, 3, operand_);
}

Tensor Parameters::gate(const Tensor& tensor) const { return are_given_ ? transposed(tensor) : tensor.share(); }

Tensor Parameters::d_w_in(Tensor tensor) const {
  return are_given_ && tensor ? viewed(tensor, 3, sizes_) : std::move(tensor);
}

Tensor Parameters::d_b_in(Tensor tensor) const {
  return are_given_ && tensor ? viewed(tensor, 2, sizes_) : std::move(tensor);
}

Tensor Parameters::d_gate(Tensor tensor) const { return are_given_ ? transposed(tensor) : std::move(tensor); }

}  // namespace anabranch::torch
