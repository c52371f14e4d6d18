#include "core/tensor.h"

#include <cstdio>
#include <string>

namespace anabranch {
namespace {

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
    default: return "unknown dtype";
  }
}

std::string dtype_names(Dtypes dtypes) {
  std::string names;
  for (int32_t dtype = AB_BOOL; dtype <= AB_FLOAT32; ++dtype) {
    if ((dtypes & (1u << dtype)) == 0) continue;
    if (!names.empty()) names += " or ";
    names += dtype_name(dtype);
  }
  return names;
}

std::string shape_text(const ab_tensor& tensor) {
  std::string text = "[";
  for (int32_t i = 0; i < tensor.rank && i < AB_MAX_RANK; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.shape[i]);
  }
  text.push_back(']');
  return text;
}

std::string shape_text(std::initializer_list<Axis> shape) {
  std::string text = "[";
  for (const Axis& axis : shape) {
    if (text.size() > 1) text += ", ";
    text += axis.name;
    if (axis.size >= 0) text.append("=").append(std::to_string(axis.size));
  }
  text.push_back(']');
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

bool is_contiguous(const ab_tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t stride = 1;
  for (int32_t i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case AB_BOOL:
    case AB_UINT8: return 1;
    case AB_INT16:
    case AB_FLOAT16:
    case AB_BFLOAT16: return 2;
    case AB_INT32:
    case AB_FLOAT32: return 4;
    case AB_INT64: return 8;
    default: return 0;
  }
}

int64_t num_elements(const ab_tensor& tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.rank; ++i) count *= tensor.shape[i];
  return count;
}

ab_status check_tensor(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  const std::string expected = dtype_names(dtypes).append(" ").append(shape_text(shape));
  if (tensor == nullptr) return AB_INVALID("%s: got NULL, expected %s", name, expected.c_str());
  const bool known = tensor->dtype >= AB_BOOL && tensor->dtype <= AB_FLOAT32;
  if (!known || (dtypes & (1u << tensor->dtype)) == 0 || !has_shape(*tensor, shape)) {
    return AB_INVALID("%s: got %s (%d) %s, expected %s", name, dtype_name(tensor->dtype), tensor->dtype,
                      shape_text(*tensor).c_str(), expected.c_str());
  }
  if (!is_contiguous(*tensor)) {
    return AB_INVALID("%s: got strides that are not contiguous, expected row-major %s", name,
                      shape_text(*tensor).c_str());
  }
  if (tensor->data == nullptr && num_elements(*tensor) > 0) {
    return AB_INVALID("%s: got data NULL, expected memory for %s", name, shape_text(*tensor).c_str());
  }
  return ok();
}

ab_status check_optional(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape) {
  return tensor == nullptr ? ok() : check_tensor(name, tensor, dtypes, shape);
}

ab_status check_struct(const char* name, const void* args, size_t got, size_t expected) {
  if (args == nullptr) return AB_INVALID("%s: got NULL, expected a pointer to its arguments", name);
  if (got != expected) return AB_INVALID("%s: got size %zu, expected %zu", name, got, expected);
  return ok();
}

ab_status check_workspace(const ab_exec* exec, size_t needed) {
  if (needed == 0) return ok();
  const size_t got = exec == nullptr ? 0 : exec->workspace_size;
  if (got < needed) return AB_INVALID("workspace: got %zu bytes, expected at least %zu", got, needed);
  if (exec->workspace == nullptr) return AB_INVALID("workspace: got NULL, expected %zu bytes", needed);
  if (reinterpret_cast<uintptr_t>(exec->workspace) % 64 != 0) {
    return AB_INVALID("workspace: got an address that is not 64-byte aligned, expected one that is");
  }
  return ok();
}

}  // namespace anabranch
