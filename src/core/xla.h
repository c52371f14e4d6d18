// Binds a C function to an XLA FFI handler.
//
// An operation lists the fields of its args struct once, by name. A call from XLA passes its buffers as variadic
// operands and results. Two attributes name them ("operands" and "results", comma-separated), so any optional tensor
// may be absent. Every option is an attribute with the name of its field. A buffer whose axes have another order than
// those of the operation has an entry in the optional attribute "orders": "w_in:0312" means that axes 0, 1, 2, 3 of the
// operation's W_in are axes 0, 3, 1, 2 of the buffer. The optional attribute "fp4" names buffers of bytes [..., N, 16]
// that are float4_e2m1 [..., 32 N], two per byte.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "anabranch/types.h"
#ifdef ANABRANCH_CUDA
#include "anabranch/cuda.h"
#endif
#include "xla/ffi/api/ffi.h"

namespace anabranch::xla {

namespace ffi = ::xla::ffi;

enum class FieldKind { tensor, int32, float32 };

struct Field {
  const char* name;
  size_t offset;
  FieldKind kind;
  bool optional = false;  // 0 if an older program does not name it
};

// A field of the args struct `type`, for the list of an operation's fields in its xla.cc.
#define AB_TENSOR(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::tensor }
#define AB_INT32(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::int32 }
#define AB_FLOAT(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::float32 }

// Options added after 0.1.0, so that programs exported earlier still run.
#define AB_LATER_INT32(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::int32, true }
#define AB_LATER_FLOAT(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::float32, true }

constexpr int kMaxBuffers = 48;

// A tensor view with memory for its strides.
struct View {
  ab_tensor tensor;
  int64_t strides[AB_MAX_RANK];
};

// Fills the fields of `args` (a zeroed args struct) from one call; `views` holds the tensors. A result named
// "workspace" goes to *workspace.
ffi::Error decode(std::span<const Field> fields, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                  const ffi::Dictionary& attributes, void* args, View (&views)[kMaxBuffers], ab_tensor* workspace);

ffi::Error to_error(const ab_status& status);

#ifdef ANABRANCH_CUDA

// Runs `function` on the stream of the call. Its workspace is the result with that name: XLA owns the memory, so a
// command buffer can capture the call.
template <class Args>
ffi::Error run(std::span<const Field> fields, ab_status (*function)(const Args*, const ab_exec*), void* stream,
               const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const ffi::Dictionary& attributes) {
  Args args{};
  args.size = sizeof(Args);
  View views[kMaxBuffers];
  ab_tensor workspace{};
  if (ffi::Error error = decode(fields, operands, results, attributes, &args, views, &workspace); error.failure()) {
    return error;
  }
  const ab_exec exec{sizeof(ab_exec), 0, stream, workspace.data, static_cast<size_t>(workspace.shape[0])};
  return to_error(function(&args, &exec));
}

// Defines the exported handler of ab_cuda_NAME. Its workspace is a result, so the query is not used.
#define AB_XLA_HANDLER(name, fields, workspace)                                                               \
  static ::anabranch::xla::ffi::Error name##_run(void* stream, ::anabranch::xla::ffi::RemainingArgs operands, \
                                                 ::anabranch::xla::ffi::RemainingRets results,                \
                                                 ::anabranch::xla::ffi::Dictionary attributes) {              \
    return ::anabranch::xla::run(fields, ab_cuda_##name, stream, operands, results, attributes);              \
  }                                                                                                           \
  extern "C" AB_API XLA_FFI_Error* ab_cuda_xla_##name(XLA_FFI_CallFrame*);                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(ab_cuda_xla_##name, name##_run,                                               \
                                ::anabranch::xla::ffi::Ffi::Bind()                                            \
                                    .Ctx<::anabranch::xla::ffi::PlatformStream<void*>>()                      \
                                    .RemainingArgs()                                                          \
                                    .RemainingRets()                                                          \
                                    .Attrs(),                                                                 \
                                {::anabranch::xla::ffi::Traits::kCmdBufferCompatible})

#else

// Memory for a workspace, 64-byte aligned, to be freed with std::free; nullptr on failure.
void* allocate(size_t bytes);

// Requests huge pages for large results, which are freshly allocated memory.
void prepare_results(const ffi::RemainingRets& results);

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Runs `function` on the CPU with decoded arguments and a temporary workspace. workspace nullptr: it needs none.
template <class Args>
ffi::Error run(std::span<const Field> fields, ab_status (*function)(const Args*, const ab_exec*),
               std::type_identity_t<ab_status (*)(const Args*, const ab_exec*, size_t*)> workspace,
               const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const ffi::Dictionary& attributes) {
  Args args{};
  args.size = sizeof(Args);
  View views[kMaxBuffers];
  ab_tensor unused{};  // the workspace of other platforms
  if (ffi::Error error = decode(fields, operands, results, attributes, &args, views, &unused); error.failure()) {
    return error;
  }
  prepare_results(results);

  ab_exec exec{sizeof(ab_exec), 0, nullptr, nullptr, 0};
  std::unique_ptr<void, FreeDeleter> memory;
  if (workspace != nullptr) {
    const ab_status status = workspace(&args, &exec, &exec.workspace_size);
    if (status.code != AB_OK) return to_error(status);
    if (exec.workspace_size > 0) memory.reset(allocate(exec.workspace_size));
    if (exec.workspace_size > 0 && memory == nullptr) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "anabranch: no memory for a workspace of " + std::to_string(exec.workspace_size) + " bytes");
    }
    exec.workspace = memory.get();
  }
  return to_error(function(&args, &exec));
}

// Defines the exported handler of ab_NAME.
#define AB_XLA_HANDLER(name, fields, workspace)                                                  \
  static ::anabranch::xla::ffi::Error name##_run(::anabranch::xla::ffi::RemainingArgs operands,  \
                                                 ::anabranch::xla::ffi::RemainingRets results,   \
                                                 ::anabranch::xla::ffi::Dictionary attributes) { \
    return ::anabranch::xla::run(fields, ab_##name, workspace, operands, results, attributes);   \
  }                                                                                              \
  extern "C" AB_API XLA_FFI_Error* ab_xla_##name(XLA_FFI_CallFrame*);                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(ab_xla_##name, name##_run,                                       \
                                ::anabranch::xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs())

#endif

}  // namespace anabranch::xla
