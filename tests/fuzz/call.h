// One call of the C interface: its struct, its tensors and their memory, exactly as large as the shapes say.
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

// Whether the CUDA code is called, on tests/emulation's GPU.
#if defined(ANABRANCH_FUZZ_EMULATED)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

struct Operand {
  std::string name;
  const ab_tensor** field = nullptr;  // of the struct, which names it or is NULL
  ab_tensor view{};
  bool output = false;
  const int32_t* skips = nullptr;  // an option that, if 1, leaves some elements to chance
  std::function<bool()> is_read;   // of an output, as the options are: whether what stands there matters
  int64_t limit = 0;               // indices are about [-1, limit]
  bool distinct = false;           // no index stands there twice, -1 excepted
  bool nonnegative = false;
  bool finite = false;                        // unless the call is extreme
  std::function<void(char* content)> derive;  // from the operands before it, unless the call is mutated
  const Operand* in = nullptr;                // the operand whose memory it shares
  std::vector<int64_t> strides;               // where there are any

  // How an output is compared with the other backend's (compare.h).
  bool exact = false;  // to the bit
  double scale = 0.0;  // the size of the terms of its sums, which may cancel; 0: its own largest element
  std::function<std::string(const char* content)> fault;  // instead: what is wrong with it

  Memory memory;              // none: it shares another operand's
  std::vector<char> content;  // what an input holds, and an output that is kept

  bool is_given() const { return *field == &view; }
  bool is_compared() const { return output && is_given() && (skips == nullptr || *skips == 0); }
  bool is_kept() const { return is_read && is_read(); }
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

  // What stands past the size that the struct claims is not given.
  void cut();

  // The struct in memory of the size that it claims.
  std::vector<char> args() const;

  // Its fields as the callee sees them: what stands past the size that the struct claims is zero.
  template <class Args>
  Args args_as() const {
    std::vector<char> bytes = args();
    bytes.resize(sizeof(Args));
    Args fields;
    std::memcpy(&fields, bytes.data(), sizeof(Args));
    return fields;
  }

  // Memory and content for every tensor.
  void allocate(Random& random);

  // Inputs as they were, garbage in outputs.
  void reset(uint64_t garbage);

  // The first input that is no longer what it was; nullptr: none.
  const Operand* changed_input() const;
  // The first output that is no longer the garbage.
  const Operand* written_output(uint64_t garbage) const;
  // The bytes of all outputs that can be compared.
  std::vector<std::vector<char>> results() const;
  // The first operand beside whose memory something was written.
  const Operand* overrun() const;

  std::string text() const;

  const Operation* operation = nullptr;
  size_t args_size = 0;
  std::deque<Operand> operands;
  std::vector<std::pair<const char*, int32_t*>> options;
  std::vector<std::pair<const char*, float*>> numbers;
  bool mutated = false;
  bool is_extreme = false;        // numbers are so large or small that only exact results can be compared
  bool has_infinities = true;     // among its numbers, as NaN is
  bool in_float32 = false;        // the operation computes in float32 whatever the dtypes of its tensors
  std::function<bool()> is_open;  // whether rounding may decide between very different results

 private:
  bool share(Random& random, Operand* operand);
  bool is_taken_over(const Operand& operand) const;

  std::vector<uint64_t> args_;
};

// The bytes of the elements that a view says it has; -1: more than 8 MiB, or no number.
int64_t small_bytes(const ab_tensor& view);
size_t element_size(int32_t dtype);
bool has_elements(const ab_tensor& view);

struct Operation {
  const char* name;
  const char* args_name;
  void (*make)(const Operation&, Random&, Call*);  // a call that must succeed
  ab_status (*run)(const void* args, const ab_exec* exec);
  ab_status (*query)(const void* args, const ab_exec* exec, size_t* bytes);  // or nullptr
  // The memory of the other backend; nullptr if there is none.
  ab_status (*other_run)(const void* args, const ab_exec* exec) = nullptr;
  ab_status (*other_query)(const void* args, const ab_exec* exec, size_t* bytes) = nullptr;
};

// All of them: operations.cc.
extern const std::vector<Operation> kOperations;

// A size that a struct of `size` bytes may claim, right or wrong.
size_t any_struct_size(Random& random, size_t size);

// Breaks something, or not.
void mutate(Random& random, Call* call);

}  // namespace anabranch::fuzz
