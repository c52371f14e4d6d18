#include "core/tensor.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <span>

namespace anabranch {
namespace {

constexpr int32_t kLastDtype = AB_FLOAT8_E8M0;

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case AB_BOOL: return "bool";
    case AB_UINT8: return "uint8";
    case AB_INT16: return "int16";
    case AB_INT32: return "int32";
    case AB_INT64: return "int64";
    case AB_FLOAT16: return "float16";
    case AB_BFLOAT16: return "bfloat16";
    case AB_FLOAT32: return "float32";
    case AB_FLOAT8_E4M3: return "float8_e4m3";
    case AB_FLOAT4_E2M1X2: return "float4_e2m1x2";
    case AB_FLOAT8_E8M0: return "float8_e8m0";
    default: return "unknown dtype";
  }
}

// The text of a message, truncated to a fixed size; allocates no memory.
class Text {
 public:
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const int written = std::vsnprintf(chars_ + size_, sizeof(chars_) - size_, format, args);
    va_end(args);
    size_ = std::min(size_ + static_cast<size_t>(std::max(written, 0)), sizeof(chars_) - 1);
  }
  const char* chars() const { return chars_; }

 private:
  char chars_[256] = "";
  size_t size_ = 0;
};

// The sizes of the axes, as far as the rank is valid.
std::span<const int64_t> axes(const ab_tensor& tensor) {
  return {tensor.shape, static_cast<size_t>(std::clamp(tensor.rank, 0, AB_MAX_RANK))};
}

Text shape_text(const ab_tensor& tensor) {
  Text text;
  const char* before = "[";
  for (const int64_t size : axes(tensor)) {
    text.add("%s%lld", before, static_cast<long long>(size));
    before = ", ";
  }
  text.add(axes(tensor).empty() ? "[]" : "]");
  if (tensor.rank < 0 || tensor.rank > AB_MAX_RANK) text.add(" of rank %d", tensor.rank);
  return text;
}

Text expected_text(Dtypes dtypes, std::initializer_list<Axis> shape) {
  Text text;
  const char* before = "";
  for (int32_t dtype = AB_BOOL; dtype <= kLastDtype; ++dtype) {
    if ((dtypes & (1u << dtype)) == 0) continue;
    text.add("%s%s", before, dtype_name(dtype));
    before = " or ";
  }
  before = " [";
  for (const Axis& axis : shape) {
    text.add("%s%s", before, axis.name);
    if (axis.size >= 0) text.add("=%lld", static_cast<long long>(axis.size));
    before = ", ";
  }
  text.add(shape.size() == 0 ? " []" : "]");
  return text;
}

bool has_shape(const ab_tensor& tensor, std::initializer_list<Axis> shape) {
  if (tensor.rank != static_cast<int32_t>(shape.size())) return false;
  int32_t i = 0;
  for (const Axis& axis : shape) {
    const int64_t size = tensor.shape[i++];
    if (size < 0 || (axis.size >= 0 && size != axis.size)) return false;
  }
  return true;
}

// Whether the tensor has at most kMaxBytes, counting an axis of size 0 as size 1.
bool fits_memory(const ab_tensor& tensor) {
  int64_t bytes = dtype_size(tensor.dtype);
  for (const int64_t size : axes(tensor)) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes) || bytes > kMaxBytes) return false;
  }
  return true;
}

bool is_empty(const ab_tensor& tensor) {
  return std::ranges::any_of(axes(tensor), [](int64_t size) { return size == 0; });
}

constexpr Order kRowMajor = {{0, 1, 2, 3, 4, 5}};

bool is_in_order(const ab_tensor& tensor, const Order& order) {
  int64_t stride = 1;
  for (int32_t i = AB_MAX_RANK; i-- > 0;) {
    if (i >= tensor.rank) continue;
    const int32_t axis = order.axes[i];
    if (tensor.shape[axis] != 1 && stride_of(tensor, axis) != stride) return false;
    stride *= std::max<int64_t>(tensor.shape[axis], 1);
  }
  return true;
}

Text order_text(std::initializer_list<Axis> shape, std::span<const Order> orders) {
  Text text;
  for (size_t i = 0; i < orders.size(); ++i) {
    const char* before = i == 0 ? "(" : i + 1 < orders.size() ? ", (" : " or (";
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      text.add("%s%s", before, shape.begin()[orders[i].axes[axis]].name);
      before = ", ";
    }
    text.add(")");
  }
  return text;
}

// Checks everything except the strides and the memory.
ab_status check_view(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  if (tensor == nullptr) return AB_INVALID("%s: got NULL, expected %s", name, expected_text(dtypes, shape).chars());
  const bool known = tensor->dtype >= AB_BOOL && tensor->dtype <= kLastDtype;
  if (!known || (dtypes & (1u << tensor->dtype)) == 0 || !has_shape(*tensor, shape)) {
    return AB_INVALID("%s: got %s (%d) %s, expected %s", name, dtype_name(tensor->dtype), tensor->dtype,
                      shape_text(*tensor).chars(), expected_text(dtypes, shape).chars());
  }
  if (!fits_memory(*tensor)) {
    return AB_INVALID("%s: got %s %s, expected sizes whose product is at most 2^56 bytes", name,
                      dtype_name(tensor->dtype), shape_text(*tensor).chars());
  }
  return ok();
}

ab_status check_memory(const char* name, const ab_tensor& tensor) {
  if (tensor.data != nullptr || is_empty(tensor)) return ok();
  return AB_INVALID("%s: got data NULL, expected memory for %s", name, shape_text(tensor).chars());
}

}  // namespace

int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case AB_BOOL:
    case AB_UINT8:
    case AB_FLOAT8_E4M3:
    case AB_FLOAT4_E2M1X2:
    case AB_FLOAT8_E8M0: return 1;
    case AB_INT16:
    case AB_FLOAT16:
    case AB_BFLOAT16: return 2;
    case AB_INT32:
    case AB_FLOAT32: return 4;
    case AB_INT64: return 8;
    default: return 0;
  }
}

int64_t stride_of(const ab_tensor& tensor, int32_t axis) {
  if (tensor.strides != nullptr) return tensor.strides[axis];
  int64_t stride = 1;
  for (int32_t i = axis + 1; i < tensor.rank; ++i) stride *= std::max<int64_t>(tensor.shape[i], 1);
  return stride;
}

bool is_contiguous(const ab_tensor& tensor) { return is_in_order(tensor, kRowMajor) || is_empty(tensor); }

ab_status check_tensor(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  AB_RETURN_IF_ERROR(check_view(name, tensor, dtypes, shape));
  if (!is_contiguous(*tensor)) {
    return AB_INVALID("%s: got strides that are not contiguous, expected row-major %s", name,
                      shape_text(*tensor).chars());
  }
  return check_memory(name, *tensor);
}

ab_status check_strided(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  AB_RETURN_IF_ERROR(check_view(name, tensor, dtypes, shape));
  for (int32_t axis = 0; axis < tensor->rank; ++axis) {
    const int64_t stride = stride_of(*tensor, axis);
    int64_t reach = 0;
    if (!__builtin_mul_overflow(std::max<int64_t>(tensor->shape[axis] - 1, 0), stride, &reach) && -kMaxBytes <= reach &&
        reach <= kMaxBytes) {
      continue;
    }
    return AB_INVALID("%s: got stride %lld along axis %d, expected elements at most 2^56 apart", name,
                      static_cast<long long>(stride), axis);
  }
  return check_memory(name, *tensor);
}

ab_status check_ordered(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape,
                        std::span<const Order> orders, size_t* match) {
  AB_RETURN_IF_ERROR(check_view(name, tensor, dtypes, shape));
  for (*match = 0; *match < orders.size(); ++*match) {
    const Order& order = orders[*match];
    if (is_in_order(*tensor, order)) return check_memory(name, *tensor);
  }
  return AB_INVALID("%s: got unsupported strides, expected %s with the memory order %s", name,
                    shape_text(*tensor).chars(), order_text(shape, orders).chars());
}

ab_status check_optional(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  return tensor == nullptr ? ok() : check_tensor(name, tensor, dtypes, shape);
}

ab_status report_workspace(size_t needed, size_t* bytes) {
  if (needed > static_cast<size_t>(kMaxBytes)) {
    return error(AB_UNSUPPORTED, "workspace: got sizes that need more than 2^56 bytes, expected smaller sizes");
  }
  *bytes = needed;
  return ok();
}

ab_status check_workspace(const ab_exec* exec, size_t needed) {
  AB_RETURN_IF_ERROR(report_workspace(needed, &needed));
  if (needed == 0) return ok();
  if (exec->workspace_size < needed) {
    return AB_INVALID("workspace: got %zu bytes, expected at least %zu", exec->workspace_size, needed);
  }
  if (exec->workspace == nullptr) return AB_INVALID("workspace: got NULL, expected %zu bytes", needed);
  if (reinterpret_cast<uintptr_t>(exec->workspace) % 64 != 0) {
    return AB_INVALID("workspace: got an address that is not 64-byte aligned, expected one that is");
  }
  return ok();
}

}  // namespace anabranch
