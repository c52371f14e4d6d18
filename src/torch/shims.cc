#include "torch/shims.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace anabranch::torch {

Shims shims;

namespace {

// torch encodes the version for which a caller is built in this way; a later torch then converts arguments and results.
constexpr uint64_t kBuiltFor = (uint64_t{2} << 56) | (uint64_t{10} << 48);

template <typename Function>
bool find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

void row_major(int64_t rank, const int64_t* sizes, int64_t* strides) {
  int64_t step = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= sizes[axis] > 1 ? sizes[axis] : 1;  // torch counts an axis of size 0 as 1
  }
}

}  // namespace

void fail(int code, const std::string& text) {
  throw std::runtime_error("anabranch:" + std::to_string(code) + ":" + text);
}

const char* find_shims(void* cpu, void* cuda) {
#define ANABRANCH_TORCH_REQUIRE(field, symbol, ...) \
  if (!find(cpu, symbol, shims.field)) return symbol;
  ANABRANCH_TORCH_SHIMS(ANABRANCH_TORCH_REQUIRE)
#undef ANABRANCH_TORCH_REQUIRE
  bool newer = true;
#define ANABRANCH_TORCH_FIND(field, symbol, ...) newer = find(cpu, symbol, shims.field) && newer;
  ANABRANCH_TORCH_NEWER_SHIMS(ANABRANCH_TORCH_FIND)
#undef ANABRANCH_TORCH_FIND
  if (!newer) shims.list_size = nullptr;  // all or none
  if (!newer && !find(RTLD_DEFAULT, "omp_get_max_threads", shims.omp_get_max_threads)) return "omp_get_max_threads";
  if (cuda != nullptr) {
#define ANABRANCH_TORCH_REQUIRE(field, symbol, ...) \
  if (!find(cuda, symbol, shims.field)) return symbol;
    ANABRANCH_TORCH_CUDA_SHIMS(ANABRANCH_TORCH_REQUIRE)
#undef ANABRANCH_TORCH_REQUIRE
  }
  find(cpu, "torch_delete_stable_ivalue", shims.delete_value);
  return nullptr;
}

bool takes_lists() { return shims.list_size != nullptr; }

void check(Error error, const char* action) {
  if (error != 0) throw std::runtime_error(std::string("anabranch: torch failed to ") + action);
}

Error register_kernel(void* library, const char* name, Kernel kernel) {
  return takes_lists() ? shims.library_impl(library, name, kernel, kBuiltFor)
                       : shims.library_impl_2_9(library, name, kernel);
}

Error dispatch(const char* name, const char* overload, Value* stack) {
  return takes_lists() ? shims.call_dispatcher(name, overload, stack, kBuiltFor)
                       : shims.call_dispatcher_2_9(name, overload, stack);
}

int32_t num_threads() {
  if (!takes_lists()) return shims.omp_get_max_threads();
  uint32_t threads = 0;
  check(shims.get_num_threads(&threads), "return its number of threads");
  return static_cast<int32_t>(threads);
}

void Tensor::reset(Handle handle) {
  if (handle_ != nullptr) shims.delete_tensor(handle_);
  handle_ = handle;
}

Value Tensor::release_value() {
  if (handle_ == nullptr) check(shims.new_undefined(&handle_), "make an undefined tensor");
  return reinterpret_cast<Value>(release());
}

Tensor Tensor::share() const {
  Handle handle;
  check(shims.new_handle(handle_, &handle), "share a tensor");
  return Tensor(handle);
}

void* Tensor::data() const {
  void* data;
  check(shims.get_data(handle_, &data), "return an address");
  return data;
}

int32_t Tensor::dtype() const {
  int32_t dtype;
  check(shims.get_dtype(handle_, &dtype), "return a dtype");
  return dtype;
}

int64_t Tensor::rank() const {
  int64_t rank;
  check(shims.get_rank(handle_, &rank), "return a rank");
  return rank;
}

const int64_t* Tensor::sizes() const {
  int64_t* sizes;
  check(shims.get_sizes(handle_, &sizes), "return sizes");
  return sizes;
}

int32_t Tensor::device_type() const {
  int32_t type;
  check(shims.get_device_type(handle_, &type), "return a device");
  return type;
}

int32_t Tensor::device_index() const {
  int32_t index;
  check(shims.get_device_index(handle_, &index), "return a device");
  return index;
}

Tensor empty(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  int64_t strides[kMaxRank];
  row_major(rank, sizes, strides);
  Handle handle = nullptr;
  if (shims.empty_strided(rank, sizes, strides, dtype, device_type, device_index, &handle) != 0) {
    fail(kTorchOutOfMemory, "torch failed to allocate memory");
  }
  return Tensor(handle);
}

Tensor zeros(int64_t rank, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  Tensor tensor = empty(rank, sizes, dtype, device_type, device_index);
  Value stack[] = {tensor.release_value()};
  check(dispatch("aten::zero_", "", stack), "clear a tensor");
  return Tensor(stack[0]);
}

bool is_contiguous(const Tensor& tensor) {
  bool result;
  check(shims.is_contiguous(tensor.get(), &result), "return strides");
  return result;
}

Tensor contiguous(Tensor tensor) {
  if (is_contiguous(tensor)) return tensor;
  Value stack[] = {tensor.release_value(), 0};  // 0: the contiguous memory format
  check(dispatch("aten::contiguous", "", stack), "copy a tensor");
  return Tensor(stack[0]);
}

Tensor viewed(const Tensor& tensor, int64_t rank, const int64_t* sizes, int64_t start) {
  int64_t strides[kMaxRank];
  row_major(rank, sizes, strides);
  Handle handle;
  check(shims.reinterpret(tensor.get(), rank, sizes, strides, start, &handle), "view a tensor");
  return Tensor(handle);
}

Tensor view_as(const Tensor& tensor, int32_t dtype) {
  Value stack[] = {tensor.share().release_value(), static_cast<Value>(dtype)};
  check(dispatch("aten::view", "dtype", stack), "view a tensor");
  return Tensor(stack[0]);
}

Tensor transposed(const Tensor& matrix) {
  int64_t* strides;
  check(shims.get_strides(matrix.get(), &strides), "return strides");
  const int64_t *sizes = matrix.sizes(), swapped[] = {sizes[1], sizes[0]}, steps[] = {strides[1], strides[0]};
  Handle handle;
  check(shims.reinterpret(matrix.get(), 2, swapped, steps, 0, &handle), "transpose a matrix");
  return Tensor(handle);
}

Tensor to_dtype(const Tensor& tensor, int32_t dtype) {
  if (tensor.dtype() == dtype) return tensor.share();
  Value stack[] = {tensor.share().release_value(), static_cast<Value>(dtype), 0, 0, 0};
  check(dispatch("aten::to", "dtype", stack), "convert a tensor");
  return Tensor(stack[0]);
}

Tensor matmul(const Tensor& a, const Tensor& b, int32_t dtype) {
  Value stack[] = {a.share().release_value(), b.share().release_value(), static_cast<Value>(dtype)};
  check(dispatch("aten::mm", dtype == a.dtype() ? "" : "dtype", stack), "multiply matrices");
  return Tensor(stack[0]);
}

}  // namespace anabranch::torch
