#include "core/xla.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "core/tensor.h"

namespace anabranch::xla {
namespace {

int32_t dtype_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED: return AB_BOOL;
    case ffi::DataType::U8: return AB_UINT8;
    case ffi::DataType::S16: return AB_INT16;
    case ffi::DataType::S32: return AB_INT32;
    case ffi::DataType::S64: return AB_INT64;
    case ffi::DataType::F16: return AB_FLOAT16;
    case ffi::DataType::BF16: return AB_BFLOAT16;
    case ffi::DataType::F32: return AB_FLOAT32;
    case ffi::DataType::F8E4M3FN: return AB_FLOAT8_E4M3;
    case ffi::DataType::F8E8M0FNU: return AB_FLOAT8_E8M0;
    default: return 0;
  }
}

const Field* find(std::span<const Field> fields, std::string_view name) {
  for (const Field& field : fields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

}  // namespace

ffi::Error invalid(std::string message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message)); }

ffi::Error to_error(const ab_status& status) {
  switch (status.code) {
    case AB_OK: return ffi::Error::Success();
    case AB_INVALID_ARGUMENT: return invalid(status.message);
    case AB_UNSUPPORTED: return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message);
    case AB_OUT_OF_MEMORY: return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.message);
    default: return ffi::Error(ffi::ErrorCode::kInternal, status.message);
  }
}

ab_tensor view_of(const ffi::AnyBuffer& buffer) {
  ab_tensor view{};
  view.data = buffer.untyped_data();
  view.dtype = dtype_of(buffer.element_type());
  const auto dimensions = buffer.dimensions();
  view.rank = static_cast<int32_t>(dimensions.size());
  for (size_t i = 0; i < dimensions.size() && i < AB_MAX_RANK; ++i) view.shape[i] = dimensions[i];
  return view;
}

std::string_view take_name(std::string_view& names) {
  const size_t comma = names.find(',');
  const std::string_view name = names.substr(0, comma);
  names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
  return name;
}

namespace {

// Whether "NAME,..." contains a name.
bool contains(std::string_view names, std::string_view name) {
  while (!names.empty()) {
    if (take_name(names) == name) return true;
  }
  return false;
}

// Views bytes [..., N, 16] as float4_e2m1 [..., 32 N]. Returns false for other buffers.
bool view_as_fp4(ab_tensor* view) {
  constexpr int64_t kBytes = 16;  // of a block, with two elements each
  if (view->dtype != AB_UINT8 || view->rank < 2 || view->rank > AB_MAX_RANK || view->shape[view->rank - 1] != kBytes) {
    return false;
  }
  view->dtype = AB_FLOAT4_E2M1X2;
  view->shape[--view->rank] = 0;
  view->shape[view->rank - 1] *= 2 * kBytes;
  return true;
}

}  // namespace

Arguments::Arguments(const Operation& operation) : operation_(operation) {
  std::memset(args_, 0, operation.args_bytes);
  std::memcpy(args_, &operation.args_bytes, sizeof(size_t));  // the first field of every args struct
}

void* Arguments::field(std::string_view name, FieldKind kind) {
  const Field* found = find(operation_.fields, name);
  return found == nullptr || found->kind != kind ? nullptr : args_ + found->offset;
}

bool Arguments::place(std::string_view name, const ab_tensor& tensor, std::string_view orders, std::string_view fp4) {
  void* const place = field(name, FieldKind::tensor);
  if (place == nullptr || used_ == kMaxBuffers || tensor.rank > AB_MAX_RANK) return false;
  if (*static_cast<const ab_tensor**>(place) != nullptr) return false;
  View& view = views_[used_];
  view.tensor = tensor;
  if (contains(fp4, name) && !view_as_fp4(&view.tensor)) return false;
  if (!reorder(orders, name, &view)) return false;
  *static_cast<const ab_tensor**>(place) = &view.tensor;
  ++used_;
  return true;
}

// Reorders the axes of `view` according to the entry of `name` in "NAME:ORDER,...". Returns false if the order is
// invalid.
bool Arguments::reorder(std::string_view orders, std::string_view name, View* view) {
  while (!orders.empty()) {
    const std::string_view entry = take_name(orders);
    const size_t colon = entry.find(':');
    if (entry.substr(0, colon) != name || colon == std::string_view::npos) continue;
    const std::string_view order = entry.substr(colon + 1);
    const ab_tensor stored = view->tensor;
    if (order.size() != static_cast<size_t>(stored.rank)) return false;
    for (size_t i = 0; i < order.size(); ++i) {
      const int axis = order[i] - '0';
      if (axis < 0 || axis >= stored.rank) return false;
      view->tensor.shape[i] = stored.shape[axis];
      view->strides[i] = 1;
      for (int32_t inner = axis + 1; inner < stored.rank; ++inner)
        view->strides[i] *= std::max<int64_t>(stored.shape[inner], 1);
    }
    view->tensor.strides = view->strides;
    return true;
  }
  return true;
}

ffi::Error Arguments::read_numbers(const ffi::Dictionary& attributes) {
  const auto read = [&]<class T>(const Field& field, T unused) {
    const auto value = attributes.get<T>(field.name);
    if (value.has_value()) std::memcpy(args_ + field.offset, &*value, sizeof(unused));
    return value.has_value();
  };
  for (const Field& field : operation_.fields) {
    if (field.optional && !attributes.contains(field.name)) continue;
    if (field.kind == FieldKind::int32 && !read(field, int32_t{})) {
      return invalid(std::string("anabranch: no int32 attribute ") + field.name);
    }
    if (field.kind == FieldKind::float32 && !read(field, float{})) {
      return invalid(std::string("anabranch: no float32 attribute ") + field.name);
    }
  }
  return ffi::Error::Success();
}

ffi::Error decode(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                  const ffi::Dictionary& attributes, Arguments* arguments, ab_tensor* workspace) {
  const auto operand_names = attributes.get<std::string_view>("operands");
  const auto result_names = attributes.get<std::string_view>("results");
  if (!operand_names.has_value() || !result_names.has_value()) {
    return invalid("anabranch: the call lacks the attributes operands and results");
  }
  if (operands.size() + results.size() > kMaxBuffers) return invalid("anabranch: the call has too many buffers");

  const auto given_orders = attributes.get<std::string_view>("orders");
  const std::string_view orders = given_orders.has_value() ? *given_orders : std::string_view();
  const auto given_fp4 = attributes.get<std::string_view>("fp4");
  const std::string_view fp4 = given_fp4.has_value() ? *given_fp4 : std::string_view();
  std::string_view names = *operand_names;
  for (size_t i = 0; i < operands.size(); ++i) {
    const std::string_view name = take_name(names);
    const auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || !arguments->place(name, view_of(*buffer), orders, fp4)) {
      return invalid("anabranch: unknown operand " + std::string(name));
    }
  }
  names = *result_names;
  for (size_t i = 0; i < results.size(); ++i) {
    const std::string_view name = take_name(names);
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_value() && name == "workspace") {
      *workspace = view_of(**buffer);
    } else if (!buffer.has_value() || !arguments->place(name, view_of(**buffer), orders, fp4)) {
      return invalid("anabranch: unknown result " + std::string(name));
    }
  }
  return arguments->read_numbers(attributes);
}

ffi::Error run(const Operation& operation, void* stream, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  Arguments arguments(operation);
  ab_tensor workspace{};
  if (ffi::Error error = decode(operands, results, attributes, &arguments, &workspace); error.failure()) return error;
#ifndef ANABRANCH_CUDA
  prepare_results(results);
#endif
  return run(operation, arguments, stream, workspace);
}

#ifdef ANABRANCH_CUDA

ffi::Error run(const Operation& operation, const Arguments& arguments, void* stream, const ab_tensor& workspace) {
  const ab_exec exec{sizeof(ab_exec), 0, stream, workspace.data, static_cast<size_t>(workspace.shape[0])};
  return to_error(operation.function(arguments.get(), &exec));
}

#else

namespace {

// Large results and workspaces are fresh memory, and zeroing it page by page takes as long as computing the result.
// Huge pages reduce that cost.
void prefer_huge_pages(void* memory, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kMinBytes = size_t{4} << 20;
  if (bytes < kMinBytes) return;
  const uintptr_t past_page = reinterpret_cast<uintptr_t>(memory) % kPage;
  char* begin = static_cast<char*>(memory) + (past_page == 0 ? 0 : kPage - past_page);
  const auto size = static_cast<size_t>(static_cast<char*>(memory) + bytes - begin);
  madvise(begin, size / kPage * kPage, MADV_HUGEPAGE);  // only advice: a failure is harmless
#else
  (void)memory;
  (void)bytes;
#endif
}

// Memory for a workspace, 64-byte aligned, to be freed with std::free; nullptr on failure.
void* allocate(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes < 2 * kHugePage ? 64 : kHugePage;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory != nullptr) prefer_huge_pages(memory, bytes);
  return memory;
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

void prepare_results(const ffi::RemainingRets& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_value()) prefer_huge_pages((*buffer)->untyped_data(), (*buffer)->size_bytes());
  }
}

ffi::Error run(const Operation& operation, const Arguments& arguments, void*, const ab_tensor&) {
  ab_exec exec{sizeof(ab_exec), 0, nullptr, nullptr, 0};
  std::unique_ptr<void, FreeDeleter> memory;
  if (operation.workspace != nullptr) {
    const ab_status status = operation.workspace(arguments.get(), &exec, &exec.workspace_size);
    if (status.code != AB_OK) return to_error(status);
    if (exec.workspace_size > 0) memory.reset(allocate(exec.workspace_size));
    if (exec.workspace_size > 0 && memory == nullptr) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "anabranch: no memory for a workspace of " + std::to_string(exec.workspace_size) + " bytes");
    }
    exec.workspace = memory.get();
  }
  return to_error(operation.function(arguments.get(), &exec));
}

#endif

}  // namespace anabranch::xla
