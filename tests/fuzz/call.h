// One call of the C interface: its struct, its tensors, and their memory, allocated at its exact size.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "anabranch/types.h"
#include "memory.h"
#include "random.h"

namespace anabranch::fuzz {

// Whether the calls run CUDA code on the emulated GPU of tests/emulation.
#if defined(ANABRANCH_FUZZ_EMULATED)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

struct Operand {
  std::string name;
  const ab_tensor** field = nullptr;  // field of the struct; points to the view or is NULL
  ab_tensor view{};
  bool output = false;
  const int32_t* skips = nullptr;  // an option that, if 1, leaves some elements undefined
  std::function<bool()> is_read;   // for an output: whether the call reads it, with the current options
  int64_t limit = 0;               // most indices are between -1 and limit
  bool distinct = false;           // no index appears twice, except -1
  bool nonnegative = false;
  bool finite = false;                        // unless the call is extreme
  std::function<void(char* content)> derive;  // computes the content from earlier operands, unless the call is mutated
  const Operand* in = nullptr;                // the operand whose memory it shares
  std::vector<int64_t> strides;               // storage for view.strides, if any

  // How an output is compared with that of the other backend (compare.h).
  bool exact = false;  // bit for bit
  // Magnitude of the terms of its sums, which may cancel. Bounds are relative to it or, if larger, to the largest
  // element.
  double scale = 0.0;
  std::function<std::string(const char* content)> fault;  // replaces the comparison: describes an error, if any

  Memory memory;              // empty if it shares the memory of another operand
  std::vector<char> content;  // content of an input, or of an output that the call reads

  bool is_given() const { return *field == &view; }
  bool is_compared() const { return output && is_given() && (skips == nullptr || *skips == 0); }
  bool keeps_content() const { return is_read && is_read(); }
};

struct Operation;

class Call {
 public:
  template <class Args>
  Args* start(const Operation& what) {
    operation = &what;
    args_.assign(sizeof(Args) / sizeof(uint64_t) + 1, 0);
    args_size = sizeof(Args);
    Args* args = reinterpret_cast<Args*>(args_.data());
    args->size = sizeof(Args);
    return args;
  }

  Operand& input(const char* name, const ab_tensor** field, int32_t dtype, std::vector<int64_t> shape,
                 int64_t limit = 0);
  Operand& output(const char* name, const ab_tensor** field, int32_t dtype, std::vector<int64_t> shape);

  // The size that the struct claims.
  size_t& size() { return *reinterpret_cast<size_t*>(args_.data()); }

  // Marks operands whose fields are past the claimed size as not passed.
  void cut();

  // Returns the struct in memory of its claimed size.
  std::vector<char> args() const;

  // Returns the fields as the callee sees them: fields past the claimed size are zero.
  template <class Args>
  Args args_as() const {
    std::vector<char> bytes = args();
    bytes.resize(sizeof(Args));
    Args fields;
    std::memcpy(&fields, bytes.data(), sizeof(Args));
    return fields;
  }

  // Allocates and fills every tensor.
  void allocate(Random& random);

  // Restores the inputs and fills outputs with garbage.
  void reset(uint64_t garbage);

  // Returns the first input that has changed, or nullptr.
  const Operand* changed_input() const;
  // Returns the first output that no longer contains the garbage, or nullptr.
  const Operand* written_output(uint64_t garbage) const;
  // Returns the bytes of all comparable outputs.
  std::vector<std::vector<char>> results() const;
  // Returns the first operand with a damaged guard zone, or nullptr.
  const Operand* overrun() const;

  std::string text() const;

  const Operation* operation = nullptr;
  size_t args_size = 0;
  std::deque<Operand> operands;
  std::vector<std::pair<const char*, int32_t*>> options;
  std::vector<std::pair<const char*, float*>> numbers;
  bool mutated = false;
  bool is_extreme = false;        // has extreme numbers; only exact results can be compared
  bool has_infinities = true;     // whether special numbers include infinities, besides NaN
  bool in_float32 = false;        // the operation computes in float32 for all tensor dtypes
  std::function<bool()> is_open;  // whether rounding may change a selection, so that results differ widely

 private:
  bool share(Random& random, Operand* operand);
  bool is_aliased_by_output(const Operand& operand) const;

  std::vector<uint64_t> args_;
};

// Returns the byte count of a view: the larger one of row-major order and of its strides. -1 if it exceeds 8 MiB or is
// invalid.
int64_t small_bytes(const ab_tensor& view);
size_t element_size(int32_t dtype);
bool has_elements(const ab_tensor& view);

struct Operation {
  const char* name;
  const char* args_name;
  void (*make)(const Operation&, Random&, Call*);  // makes a call that must succeed
  ab_status (*run)(const void* args, const ab_exec* exec);
  ab_status (*query)(const void* args, const ab_exec* exec, size_t* bytes);  // or nullptr
  // The functions of the other backend that compute the same; nullptr if there is none.
  ab_status (*other_run)(const void* args, const ab_exec* exec) = nullptr;
  ab_status (*other_query)(const void* args, const ab_exec* exec, size_t* bytes) = nullptr;
};

// All operations, defined in operations.cc.
extern const std::vector<Operation> kOperations;

// Returns a valid or invalid size for a struct of `size` bytes to claim.
size_t any_struct_size(Random& random, size_t size);

// Mutates the call with a probability of 0.6. A mutated call may still be valid.
void mutate(Random& random, Call* call);

}  // namespace anabranch::fuzz
