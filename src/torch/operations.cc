#include "torch/operations.h"

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "torch/prepared.h"

namespace anabranch::torch {

namespace {

constexpr int kMaxOperations = 64;

struct Operation {
  std::string name, kinds;
};

std::vector<Operation>& operations() {
  static auto* operations = [] {
    auto* list = new std::vector<Operation>;
    list->reserve(kMaxOperations);  // elements never move, so kernels may read while an operation is added
    return list;
  }();
  return *operations;
}

// Deletes a list or a string.
struct DeleteObject {
  char kind = 0;
  void operator()(void* object) const {
    static_cast<void>(kind == 's' ? shims.delete_string(object) : shims.delete_list(object));
  }
};

// An argument that a kernel has taken off the stack.
struct Taken {
  Tensor tensor;
  std::unique_ptr<void, DeleteObject> object;
  std::optional<int8_t> dtype;
};

void add_list(Arguments& arguments, void* list) {
  size_t size = 0;
  check(shims.list_size(list, &size), "return a list");
  arguments.add_option(static_cast<uint32_t>(size));
  for (size_t i = 0; i < size; ++i) {
    Value element;
    check(shims.list_get_item(list, i, &element), "return a list");
    arguments.add_option(element);
  }
}

void add_string(Arguments& arguments, void* string) {
  size_t size = 0;
  const char* data = nullptr;
  check(shims.string_length(string, &size), "return a string");
  check(shims.string_data(string, &data), "return a string");
  arguments.add_option(static_cast<uint32_t>(size));
  arguments.add_options(std::string(data, size));
}

void run_kernel(int32_t number, Value* stack, uint64_t num_arguments, uint64_t num_results) {
  const std::string& kinds = operations()[number].kinds;
  Arguments arguments;
  // The kernel owns its arguments. It takes them off the stack before anything can fail.
  std::vector<Taken> taken(num_arguments);
  for (uint64_t i = 0; i < num_arguments; ++i) {
    switch (kinds[i]) {
      case 'T':
      case 't': taken[i].tensor = take_tensor(stack[i], kinds[i]); break;
      case 'I':
      case 'F':
      case 's': taken[i].object = {as_pointer<void>(stack[i]), {kinds[i]}}; break;
      case 'D':
        if (stack[i] != 0) taken[i].dtype = static_cast<int8_t>(unwrap(stack[i]));
        break;
      default: break;
    }
  }
  for (uint64_t i = 0; i < num_arguments; ++i) {
    switch (kinds[i]) {
      case 'T':
      case 't':
        if (taken[i].tensor) taken[i].tensor = contiguous(std::move(taken[i].tensor));
        arguments.add(taken[i].tensor);
        break;
      case 'n': arguments.add_size(static_cast<int64_t>(stack[i])); break;
      case 'D':
        if (const std::optional<int8_t> dtype = taken[i].dtype; dtype.has_value()) {
          arguments.add_option(*dtype);
        } else {
          arguments.add_none();
        }
        break;
      case 'd': arguments.add_option(static_cast<int8_t>(stack[i])); break;
      case 'b': arguments.add_option(static_cast<int8_t>(stack[i] & 1)); break;
      case 'I':
      case 'F': add_list(arguments, taken[i].object.get()); break;
      case 's': add_string(arguments, taken[i].object.get()); break;
      default: arguments.add_option(stack[i]);  // int, float
    }
  }
  std::vector<Tensor> results = run(number, arguments);
  for (uint64_t i = 0; i < num_results; ++i) stack[i] = results[i].release_value();
}

// A boxed kernel has no data of its own, so each operation has a function.
template <int number>
void kernel(Value* stack, uint64_t num_arguments, uint64_t num_results) {
  run_kernel(number, stack, num_arguments, num_results);
}

template <int... numbers>
constexpr std::array<Kernel, sizeof...(numbers)> make_kernels(std::integer_sequence<int, numbers...>) {
  return {&kernel<numbers>...};
}

constexpr auto kKernels = make_kernels(std::make_integer_sequence<int, kMaxOperations>());

}  // namespace

Value unwrap(Value optional) {
  auto* pointer = as_pointer<Value>(optional);
  const Value value = *pointer;
  if (shims.delete_value != nullptr) {
    shims.delete_value(pointer);
  } else {
    delete pointer;
  }
  return value;
}

Tensor take_tensor(Value value, char kind) {
  if (kind == 't') {
    if (value == 0) return Tensor();
    value = unwrap(value);
  }
  return Tensor(value);
}

int32_t operation_number(const std::string& name) {
  for (size_t i = 0; i < operations().size(); ++i) {
    if (operations()[i].name == name) return static_cast<int32_t>(i);
  }
  throw std::runtime_error("anabranch: no native operation " + name);
}

int32_t add_operation(const char* name, const char* kinds) {
  if (operations().size() == size_t{kMaxOperations}) throw std::runtime_error("anabranch: too many operations");
  operations().push_back({name, kinds});
  return static_cast<int32_t>(operations().size()) - 1;
}

void register_operation(int32_t number, const char* space, const char* dispatch_key) {
  void* library = nullptr;  // never freed: that would remove the kernel
  check(shims.library_init_impl(space, dispatch_key, __FILE__, __LINE__, &library), "open a library");
  check(register_kernel(library, operations().at(number).name.c_str(), kKernels[number]), "register a kernel");
}

}  // namespace anabranch::torch
