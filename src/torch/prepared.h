// The prepared calls of an operation: what Python's PreparedCalls describes, run without Python.
#ifndef ANABRANCH_TORCH_PREPARED_H_
#define ANABRANCH_TORCH_PREPARED_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "anabranch/types.h"
#include "torch/shims.h"

namespace anabranch::torch {

// The structs of a description. python/anabranch/torch/binding/native.py has the same fields; the memory is Python's.
// Numbers are referred to by their index: first the inputs (sizes of arguments), then the nodes in order.

struct Node {
  int32_t code;  // add, sub, mul, floordiv, mod, min; -1: the constant `left`
  int64_t left, right;
};

struct Condition {
  int32_t code;  // lt, le, eq
  int32_t left, right;
  int32_t outcome;
};

struct Result {
  int32_t dtype;  // torch's number
  int32_t rank;   // -1: not requested
  int32_t sizes[kMaxRank];
};

// The address of a tensor of the calls. Memories are the arguments, the results, and the working memory.
struct Place {
  int32_t memory;
  int32_t offset;
};

// A number in a struct.
struct Cell {
  void* address;
  int32_t bytes;
  int32_t number;
};

struct Call {
  ab_status (*function)(const void* args, const ab_exec* exec);
  ab_status (*query)(const void* args, const ab_exec* exec, size_t* bytes);  // of the workspace; may be NULL
  const void* args;
  const char* phase;  // see PhaseRange
};

struct Description {
  int32_t num_given, num_results, num_places, num_cells, num_calls, num_inputs, num_nodes, num_conditions;
  int32_t working_size;     // number
  int32_t num_after_error;  // of the calls, the last ones: they run only after an error of an earlier call
  const Node* nodes;
  const Condition* conditions;
  const Result* results;
  const Place* places;
  const Cell* cells;
  const Call* calls;
  ab_tensor* tensors;  // [num_places]
  ab_exec* exec;
};

// Prepares the calls of an operation. Returns 0 and fills in the description, or keeps an exception for the caller.
using Prepare = int32_t (*)(int32_t operation, const char* key, int64_t key_size, const int64_t* inputs,
                            int64_t num_inputs, Description* description);
// Tells Python that a description is no longer used.
using Release = void (*)(const Description* description);

void set_callbacks(Prepare prepare, Release release);

// The arguments of one operation: a key of all but sizes, the sizes, and the tensors.
class Arguments {
 public:
  void add(const Tensor& tensor);  // contiguous, borrowed; NULL: not given
  void add_none();
  void add_size(int64_t size);
  template <typename T>
  void add_option(T value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add_options(const std::string& options) { key += options; }

  std::string key;
  std::vector<int64_t> inputs;
  std::vector<Handle> given;
  bool misaligned = false;  // whether an argument begins at an address for which the libraries may choose other kernels
  int32_t device_type = 0, device_index = 0;

 private:
  std::vector<int64_t> sizes_at_end_;
  friend std::vector<Tensor> run(int32_t operation, Arguments& arguments);
};

// Runs an operation and returns its results, without those that were not requested.
std::vector<Tensor> run(int32_t operation, Arguments& arguments);

// Removes all prepared calls that are not running.
void forget();
// How many calls have been prepared, and how many operations have run.
void count(int64_t* prepared, int64_t* runs);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_PREPARED_H_
