// The interface of this library to python/anabranch/torch/binding/native.py.
#include <exception>
#include <string>

#include "torch/blas.h"
#include "torch/group_layer.h"
#include "torch/layer.h"
#include "torch/layer_arguments.h"
#include "torch/operations.h"
#include "torch/prepared.h"
#include "torch/shims.h"

namespace anabranch::torch {
namespace {

// The message of the last error of a function below, which then returned -1.
thread_local std::string error;

template <typename Function>
int32_t guarded(Function function) {
  try {
    return function();
  } catch (const std::exception& exception) {
    error = exception.what();
    return -1;
  }
}

}  // namespace
}  // namespace anabranch::torch

#define AB_EXPORT extern "C" __attribute__((visibility("default")))

using namespace anabranch::torch;

// Returns the name of a function that torch lacks, or NULL. cpu, cuda: handles of torch's libraries; cuda may be NULL.
AB_EXPORT const char* ab_torch_load(void* cpu, void* cuda, Prepare prepare, Release release) {
  set_callbacks(prepare, release);
  if (const char* missing = find_shims(cpu, cuda)) return missing;
  if (cuda != nullptr) find_blas(cuda);
  return nullptr;
}

AB_EXPORT int32_t ab_torch_takes_lists() { return takes_lists(); }

AB_EXPORT const char* ab_torch_error() { return error.c_str(); }

// See add_operation; -1: failed.
AB_EXPORT int32_t ab_torch_add(const char* name, const char* kinds) {
  return guarded([&] { return add_operation(name, kinds); });
}

// See register_operation; -1: failed.
AB_EXPORT int32_t ab_torch_register(int32_t number, const char* space, const char* dispatch_key) {
  return guarded([&] {
    register_operation(number, space, dispatch_key);
    return 0;
  });
}

// Registers the kernels of the whole layer; -1: failed.
AB_EXPORT int32_t ab_torch_register_layer(const char* dispatch_key) {
  return guarded([&] {
    void* library = nullptr;  // never freed: that would remove the kernels
    check(shims.library_init_impl("anabranch", dispatch_key, __FILE__, __LINE__, &library), "open a library");
    check(register_kernel(library, "layer_forward", layer_forward), "register a kernel");
    check(register_kernel(library, "layer_backward", layer_backward), "register a kernel");
    return 0;
  });
}

// Registers the kernels of the layer over the memory of peers; -1: failed.
AB_EXPORT int32_t ab_torch_register_group_layer(const char* dispatch_key) {
  return guarded([&] {
    void* library = nullptr;  // never freed: that would remove the kernels
    check(shims.library_init_impl("anabranch", dispatch_key, __FILE__, __LINE__, &library), "open a library");
    check(register_kernel(library, "group_forward", group_forward), "register a kernel");
    check(register_kernel(library, "group_hidden", group_hidden), "register a kernel");
    check(register_kernel(library, "group_inputs", group_inputs), "register a kernel");
    return 0;
  });
}

// See add_config.
AB_EXPORT int32_t ab_torch_config(const char* layer, int64_t layer_size, const char* network, int64_t network_size,
                                  int32_t parts_first) {
  return guarded([&] {
    return add_config(std::string(layer, static_cast<size_t>(layer_size)),
                      std::string(network, static_cast<size_t>(network_size)), parts_first != 0);
  });
}

// The sizes of the structs of prepared.h, in the order of Python's tests.
AB_EXPORT void ab_torch_struct_sizes(int64_t sizes[7]) {
  int i = 0;
  for (size_t size : {sizeof(Description), sizeof(Node), sizeof(Condition), sizeof(Result), sizeof(Place), sizeof(Cell),
                      sizeof(Call)}) {
    sizes[i++] = static_cast<int64_t>(size);
  }
}

AB_EXPORT void ab_torch_forget() { forget(); }

AB_EXPORT void ab_torch_count(int64_t* prepared, int64_t* runs) { count(prepared, runs); }
