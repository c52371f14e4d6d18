#include "torch/prepared.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "torch/phase_range.h"

namespace anabranch::torch {

namespace {

constexpr uintptr_t kAlignmentOfPaths = 16;
// Upper bound on the keys with prepared calls; one more removes those that were used least recently.
constexpr size_t kMaxKeys = 4096;

Prepare prepare_in_python;
Release release_in_python;
std::atomic<int64_t> num_prepared{0}, num_runs{0};

int64_t evaluate(const Node& node, const std::vector<int64_t>& numbers) {
  if (node.code < 0) return node.left;
  const int64_t a = numbers[node.left], b = numbers[node.right];
  int64_t value = 0;
  bool overflow = false;
  switch (node.code) {
    case 0: overflow = __builtin_add_overflow(a, b, &value); break;
    case 1: overflow = __builtin_sub_overflow(a, b, &value); break;
    case 2: overflow = __builtin_mul_overflow(a, b, &value); break;
    case 3:
      overflow = b == 0;
      value = overflow ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
      break;
    case 4:
      overflow = b == 0;
      value = overflow ? 0 : (a % b + b) % b;
      break;
    default: value = std::min(a, b);
  }
  if (overflow) fail(AB_INVALID_ARGUMENT, "arguments: got sizes whose products exceed int64, expected smaller ones");
  return value;
}

bool holds(const Condition& condition, const std::vector<int64_t>& numbers) {
  const int64_t a = numbers[condition.left], b = numbers[condition.right];
  const bool outcome = condition.code == 0 ? a < b : condition.code == 1 ? a <= b : a == b;
  return outcome == (condition.outcome != 0);
}

void check_status(const ab_status& status) {
  if (status.code != AB_OK) fail(status.code, status.message);
}

// Calls that one thread at a time runs.
class Prepared {
 public:
  ~Prepared() {
    if (d.calls != nullptr) release_in_python(&d);
  }

  bool take() { return !busy_.exchange(true, std::memory_order_acquire); }
  void give_back() { busy_.store(false, std::memory_order_release); }

  // Writes the sizes. Returns false if the calls do not hold for them.
  bool fit(const std::vector<int64_t>& inputs) {
    if (inputs == inputs_) return true;
    numbers_.assign(inputs.begin(), inputs.end());
    inputs_.clear();
    for (int32_t i = 0; i < d.num_nodes; ++i) numbers_.push_back(evaluate(d.nodes[i], numbers_));
    for (int32_t i = 0; i < d.num_conditions; ++i) {
      if (!holds(d.conditions[i], numbers_)) return false;
    }
    for (int32_t i = 0; i < d.num_cells; ++i) {
      const Cell& cell = d.cells[i];
      const int64_t number = numbers_[cell.number];
      if (cell.bytes == 4) {
        const auto value = static_cast<int32_t>(number);
        if (value != number) return false;  // a new recording refuses it by name
        *static_cast<int32_t*>(cell.address) = value;
      } else {
        *static_cast<int64_t*>(cell.address) = number;
      }
    }
    inputs_ = inputs;
    has_workspace_ = false;
    return true;
  }

  std::vector<Tensor> run(const Arguments& arguments) {
    memories_.clear();
    for (Handle handle : arguments.given) {
      void* data;
      check(shims.get_data(handle, &data), "return an address");
      memories_.push_back(static_cast<char*>(data));
    }
    std::vector<Tensor> results;
    results.reserve(d.num_results);
    for (int32_t i = 0; i < d.num_results; ++i) {
      const Result& result = d.results[i];
      if (result.rank < 0) {
        results.emplace_back();
        memories_.push_back(nullptr);
        continue;
      }
      int64_t sizes[kMaxRank];
      for (int32_t axis = 0; axis < result.rank; ++axis) sizes[axis] = numbers_[result.sizes[axis]];
      results.push_back(empty(result.rank, sizes, result.dtype, arguments.device_type, arguments.device_index));
      memories_.push_back(static_cast<char*>(results.back().data()));
    }
    if (!has_workspace_ || misaligned_ != arguments.misaligned) query_workspace(arguments.misaligned);
    const int64_t working_size = numbers_[d.working_size];
    const int64_t memory_size = working_size + static_cast<int64_t>(d.exec->workspace_size);
    Tensor memory;
    char* working = nullptr;
    if (memory_size > 0) {
      memory = empty(1, &memory_size, shims.dtype_uint8(), arguments.device_type, arguments.device_index);
      working = static_cast<char*>(memory.data());
    }
    write_addresses(working);
    d.exec->workspace = working == nullptr ? nullptr : working + working_size;
    if (arguments.device_type != shims.device_type_cpu()) {
      check(shims.get_stream(arguments.device_index, &d.exec->stream), "return its stream");
    }
    const int32_t num_calls = d.num_calls - d.num_after_error;
    for (int32_t i = 0; i < num_calls; ++i) {
      const PhaseRange range(d.calls[i].phase);
      const ab_status status = d.calls[i].function(d.calls[i].args, d.exec);
      if (status.code == AB_OK) continue;
      // Copies that the calls have started may read the working memory until these calls.
      for (int32_t j = num_calls; j < d.num_calls; ++j) d.calls[j].function(d.calls[j].args, d.exec);
      check_status(status);
    }
    return results;
  }

  Description d{};

 private:
  void write_addresses(char* working) {
    memories_.push_back(working);
    for (int32_t i = 0; i < d.num_places; ++i) {
      const Place& place = d.places[i];
      d.tensors[i].data = memories_[place.memory] + numbers_[place.offset];
    }
    memories_.pop_back();
  }

  // The size may depend on the kernels that an alignment allows. The working memory is not there yet: queries read no
  // memory, and any aligned address stands for it.
  void query_workspace(bool misaligned) {
    alignas(512) static char aligned;
    write_addresses(&aligned);
    size_t largest = 0;
    for (int32_t i = 0; i < d.num_calls; ++i) {
      if (d.calls[i].query == nullptr) continue;
      size_t bytes = 0;
      check_status(d.calls[i].query(d.calls[i].args, d.exec, &bytes));
      largest = std::max(largest, bytes);
    }
    d.exec->workspace_size = largest;
    misaligned_ = misaligned;
    has_workspace_ = true;
  }

  std::atomic<bool> busy_{true};
  std::vector<int64_t> inputs_, numbers_;
  std::vector<char*> memories_;
  bool has_workspace_ = false, misaligned_ = false;
};

struct GiveBack {
  Prepared* prepared;
  ~GiveBack() {
    if (prepared != nullptr) prepared->give_back();
  }
};

// The prepared calls by operation and key, in the order of their last use.
class Cache {
 public:
  // Calls that fit, now busy; NULL: there are none.
  Prepared* take(const std::string& key, const std::vector<int64_t>& inputs) {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    order_.splice(order_.end(), order_, found->second.position);
    for (auto& prepared : found->second.calls) {
      if (!prepared->take()) continue;
      GiveBack give_back{prepared.get()};
      if (prepared->fit(inputs)) return std::exchange(give_back.prepared, nullptr);
    }
    return nullptr;
  }

  void add(const std::string& key, std::unique_ptr<Prepared> prepared) {
    std::vector<std::unique_ptr<Prepared>> removed;  // released without the lock
    std::lock_guard lock(mutex_);
    auto [found, is_new] = entries_.try_emplace(key);
    if (is_new) found->second.position = order_.insert(order_.end(), key);
    found->second.calls.push_back(std::move(prepared));
    if (entries_.size() > kMaxKeys) remove_free(order_.front(), removed);
  }

  void forget() {
    std::vector<std::unique_ptr<Prepared>> removed;
    std::lock_guard lock(mutex_);
    const std::vector<std::string> keys(order_.begin(), order_.end());
    for (const std::string& key : keys) remove_free(key, removed);
  }

 private:
  struct Entry {
    std::vector<std::unique_ptr<Prepared>> calls;
    std::list<std::string>::iterator position;
  };

  void remove_free(const std::string& key, std::vector<std::unique_ptr<Prepared>>& removed) {
    auto found = entries_.find(key);
    auto& calls = found->second.calls;
    for (auto& prepared : calls) {
      if (prepared->take()) removed.push_back(std::move(prepared));
    }
    std::erase(calls, nullptr);
    if (!calls.empty()) return;  // one is running
    order_.erase(found->second.position);
    entries_.erase(found);
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Entry> entries_;
  std::list<std::string> order_;
};

Cache& cache() {
  static Cache* cache = new Cache;  // never destroyed: Python may end first
  return *cache;
}

}  // namespace

void set_callbacks(Prepare prepare, Release release) {
  prepare_in_python = prepare;
  release_in_python = release;
}

void Arguments::add(const Tensor& tensor) {
  if (!tensor) return add_none();
  const int64_t rank = tensor.rank();
  const int64_t* sizes = tensor.sizes();
  if (given.empty()) {
    device_type = tensor.device_type();
    device_index = tensor.device_index();
  } else if (tensor.device_type() != device_type || tensor.device_index() != device_index) {
    fail(AB_INVALID_ARGUMENT, "arguments: got tensors on different devices, expected one device");
  }
  add_option(static_cast<int8_t>(tensor.dtype()));
  add_option(static_cast<int8_t>(rank));
  inputs.insert(inputs.end(), sizes, sizes + rank);
  misaligned = misaligned || reinterpret_cast<uintptr_t>(tensor.data()) % kAlignmentOfPaths != 0;
  given.push_back(tensor.get());
}

void Arguments::add_none() { add_option(int8_t{-1}); }

void Arguments::add_size(int64_t size) { sizes_at_end_.push_back(size); }

std::vector<Tensor> run(int32_t operation, Arguments& arguments) {
  arguments.inputs.insert(arguments.inputs.end(), arguments.sizes_at_end_.begin(), arguments.sizes_at_end_.end());
  const bool on_cpu = arguments.device_type == shims.device_type_cpu();
  arguments.add_option(arguments.device_type);
  arguments.add_option(arguments.device_index);
  arguments.add_option(on_cpu ? num_threads() : 0);
  arguments.add_option(operation);
  ++num_runs;
  Prepared* prepared = cache().take(arguments.key, arguments.inputs);
  if (prepared == nullptr) {
    auto made = std::make_unique<Prepared>();
    const auto& inputs = arguments.inputs;
    if (prepare_in_python(operation, arguments.key.data(), static_cast<int64_t>(arguments.key.size()), inputs.data(),
                          static_cast<int64_t>(inputs.size()), &made->d) != 0) {
      fail(kPythonError, "an exception of Python");
    }
    ++num_prepared;
    prepared = made.get();
    if (!prepared->fit(inputs)) fail(AB_INTERNAL, "calls do not hold for the sizes for which they were prepared");
    cache().add(arguments.key, std::move(made));
  }
  const GiveBack give_back{prepared};
  const DeviceGuard guard(arguments.device_type, arguments.device_index);
  return prepared->run(arguments);
}

void forget() { cache().forget(); }

void count(int64_t* prepared, int64_t* runs) {
  *prepared = num_prepared;
  *runs = num_runs;
}

}  // namespace anabranch::torch
