// The stable C functions of libtorch that the native operations call, found in the running process. Nothing of torch is
// needed to build this library: the declarations below are our own.
#ifndef ANABRANCH_TORCH_SHIMS_H_
#define ANABRANCH_TORCH_SHIMS_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace anabranch::torch {

inline constexpr int64_t kMaxRank = 6;  // of results; AB_MAX_RANK

using Handle = void*;    // AtenTensorHandle: an owned reference to a tensor
using Value = uint64_t;  // StableIValue: an argument or a result on the stack of a boxed kernel
using Error = int32_t;   // 0: success
using Kernel = void (*)(Value* stack, uint64_t num_arguments, uint64_t num_results);

// X(field, symbol, type): required functions, which exist since torch 2.9.
#define ANABRANCH_TORCH_SHIMS(X)                                                                    \
  X(delete_tensor, "aoti_torch_delete_tensor_object", Error (*)(Handle))                            \
  X(get_data, "aoti_torch_get_data_ptr", Error (*)(Handle, void**))                                 \
  X(get_rank, "aoti_torch_get_dim", Error (*)(Handle, int64_t*))                                    \
  X(get_sizes, "aoti_torch_get_sizes", Error (*)(Handle, int64_t**))                                \
  X(get_strides, "aoti_torch_get_strides", Error (*)(Handle, int64_t**))                            \
  X(get_dtype, "aoti_torch_get_dtype", Error (*)(Handle, int32_t*))                                 \
  X(get_device_type, "aoti_torch_get_device_type", Error (*)(Handle, int32_t*))                     \
  X(get_device_index, "aoti_torch_get_device_index", Error (*)(Handle, int32_t*))                   \
  X(is_contiguous, "aoti_torch_is_contiguous", Error (*)(Handle, bool*))                            \
  X(new_handle, "aoti_torch_new_tensor_handle", Error (*)(Handle, Handle*))                         \
  X(new_undefined, "aoti_torch_new_uninitialized_tensor", Error (*)(Handle*))                       \
  X(empty_strided, "aoti_torch_empty_strided",                                                      \
    Error (*)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*))         \
  X(reinterpret, "aoti_torch__reinterpret_tensor",                                                  \
    Error (*)(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*))                   \
  X(library_impl_2_9, "aoti_torch_library_impl", Error (*)(void*, const char*, Kernel))             \
  X(call_dispatcher_2_9, "aoti_torch_call_dispatcher", Error (*)(const char*, const char*, Value*)) \
  X(library_init_impl, "aoti_torch_library_init_impl",                                              \
    Error (*)(const char*, const char*, const char*, uint32_t, void**))                             \
  X(device_type_cpu, "aoti_torch_device_type_cpu", int32_t (*)())                                   \
  X(dtype_uint8, "aoti_torch_dtype_uint8", int32_t (*)())                                           \
  X(dtype_int32, "aoti_torch_dtype_int32", int32_t (*)())                                           \
  X(dtype_float32, "aoti_torch_dtype_float32", int32_t (*)())                                       \
  X(dtype_bfloat16, "aoti_torch_dtype_bfloat16", int32_t (*)())

// Functions since torch 2.10. Without them, operations with lists or strings have no native kernel.
#define ANABRANCH_TORCH_NEWER_SHIMS(X)                                                               \
  X(library_impl, "torch_library_impl", Error (*)(void*, const char*, Kernel, uint64_t))             \
  X(call_dispatcher, "torch_call_dispatcher", Error (*)(const char*, const char*, Value*, uint64_t)) \
  X(list_size, "torch_list_size", Error (*)(void*, size_t*))                                         \
  X(list_get_item, "torch_list_get_item", Error (*)(void*, size_t, Value*))                          \
  X(delete_list, "torch_delete_list", Error (*)(void*))                                              \
  X(string_length, "torch_string_length", Error (*)(void*, size_t*))                                 \
  X(string_data, "torch_string_c_str", Error (*)(void*, const char**))                               \
  X(delete_string, "torch_delete_string", Error (*)(void*))                                          \
  X(get_num_threads, "torch_get_num_threads", Error (*)(uint32_t*))

// Required functions of torch's CUDA library.
#define ANABRANCH_TORCH_CUDA_SHIMS(X)                                             \
  X(get_stream, "aoti_torch_get_current_cuda_stream", Error (*)(int32_t, void**)) \
  X(new_device_guard, "aoti_torch_create_cuda_guard", Error (*)(int32_t, void**)) \
  X(delete_device_guard, "aoti_torch_delete_cuda_guard", Error (*)(void*))

struct Shims {
#define ANABRANCH_TORCH_FIELD(field, symbol, ...) std::type_identity_t<__VA_ARGS__> field;
  ANABRANCH_TORCH_SHIMS(ANABRANCH_TORCH_FIELD)
  ANABRANCH_TORCH_NEWER_SHIMS(ANABRANCH_TORCH_FIELD)
  ANABRANCH_TORCH_CUDA_SHIMS(ANABRANCH_TORCH_FIELD)
#undef ANABRANCH_TORCH_FIELD
  // Before torch 2.10, the number of threads of its OpenMP.
  int (*omp_get_max_threads)();
  // Since torch 2.13; before, the value of an optional argument is allocated with new.
  Error (*delete_value)(Value*);
};

extern Shims shims;

// The pointer that a value holds.
template <typename Type>
Type* as_pointer(Value value) {
  return std::bit_cast<Type*>(value);
}

// Finds all functions. cuda: a handle of torch's CUDA library, or NULL. Returns the name of a missing one, or NULL.
const char* find_shims(void* cpu, void* cuda);

// Whether lists and strings can be arguments.
bool takes_lists();

// Throws std::runtime_error with the message "anabranch:CODE:text", which Python turns into its exceptions. Codes are
// those of ab_status, and the following.
inline constexpr int kPythonError = -1;  // an exception of a callback
inline constexpr int kTorchOutOfMemory = 5;
[[noreturn]] void fail(int code, const std::string& text);

// Throws std::runtime_error unless error is 0; torch has then printed the reason.
void check(Error error, const char* action);

// The three functions that have changed since torch 2.9.
Error register_kernel(void* library, const char* name, Kernel kernel);
Error dispatch(const char* name, const char* overload, Value* stack);
int32_t num_threads();

// An owned reference to a tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Handle handle) : handle_(handle) {}
  explicit Tensor(Value value) : handle_(as_pointer<void>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Tensor() { reset(nullptr); }

  Handle get() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }
  // A result on the stack. NULL becomes an undefined tensor, which is None in Python.
  Value release_value();
  Handle release() {
    Handle handle = handle_;
    handle_ = nullptr;
    return handle;
  }
  Tensor share() const;

  void* data() const;
  int32_t dtype() const;
  int64_t rank() const;
  const int64_t* sizes() const;
  int32_t device_type() const;
  int32_t device_index() const;
  bool on_cuda() const { return device_type() != shims.device_type_cpu(); }

 private:
  void reset(Handle handle);
  Handle handle_ = nullptr;
};

// Makes a device the current one for its lifetime, unless it is the CPU.
class DeviceGuard {
 public:
  DeviceGuard(int32_t device_type, int32_t device_index) {
    if (device_type == shims.device_type_cpu()) return;
    check(shims.new_device_guard(device_index, &guard_), "set the device");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_ != nullptr) shims.delete_device_guard(guard_);
  }

 private:
  void* guard_ = nullptr;
};

// A new tensor; strides are row-major.
Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index);
// A new tensor that is 0.
Tensor zeros(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index);
bool is_contiguous(const Tensor& tensor);
Tensor contiguous(Tensor tensor);
// A contiguous tensor with other sizes, beginning at element `start` of its memory.
Tensor viewed(const Tensor& tensor, int64_t rank, const int64_t* sizes, int64_t start = 0);
// tensor.view(dtype)
Tensor view_as(const Tensor& tensor, int32_t dtype);
// tensor.to(dtype)
Tensor to_dtype(const Tensor& tensor, int32_t dtype);
// The transposed view of a matrix.
Tensor transposed(const Tensor& matrix);
// torch.mm(a, b), or with another dtype torch.mm(a, b, out_dtype=dtype).
Tensor matmul(const Tensor& a, const Tensor& b, int32_t dtype);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_SHIMS_H_
