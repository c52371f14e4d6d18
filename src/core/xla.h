// Binds a C function to an XLA FFI handler.
//
// An operation lists the fields of its args struct once, by name. A call from XLA brings its buffers as variadic
// operands and results, with two attributes that name them ("operands" and "results", comma-separated), so that any
// optional tensor may be absent; every option is an attribute of the field's name.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "anabranch/types.h"
#include "xla/ffi/api/ffi.h"

namespace anabranch::xla {

namespace ffi = ::xla::ffi;

enum class FieldKind { tensor, int32, float32 };

struct Field {
  const char* name;
  FieldKind kind;
  size_t offset;
};

// The fields of `type` that an operation takes; first and only place where they are listed.
#define AB_TENSOR(type, name) \
  ::anabranch::xla::Field { #name, ::anabranch::xla::FieldKind::tensor, offsetof(type, name) }
#define AB_INT32(type, name) \
  ::anabranch::xla::Field { #name, ::anabranch::xla::FieldKind::int32, offsetof(type, name) }
#define AB_FLOAT(type, name) \
  ::anabranch::xla::Field { #name, ::anabranch::xla::FieldKind::float32, offsetof(type, name) }

constexpr int kMaxBuffers = 24;

// Fills the fields of `args` (a zeroed args struct) from one call; `views` gives the tensors room to live.
ffi::Error decode(std::span<const Field> fields, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                  const ffi::Dictionary& attributes, void* args, ab_tensor (&views)[kMaxBuffers]);

// Memory for a workspace, 64-byte aligned, to be freed with std::free; nullptr: there is none.
void* allocate(size_t bytes);

ffi::Error to_error(const ab_status& status);

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Runs `function` on the CPU with decoded arguments and a workspace of its own; workspace nullptr: it needs none.
template <class Args>
ffi::Error run(std::span<const Field> fields, ab_status (*function)(const Args*, const ab_exec*),
               std::type_identity_t<ab_status (*)(const Args*, const ab_exec*, size_t*)> workspace,
               const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const ffi::Dictionary& attributes) {
  Args args{};
  args.size = sizeof(Args);
  ab_tensor views[kMaxBuffers];
  if (ffi::Error error = decode(fields, operands, results, attributes, &args, views); error.failure()) return error;

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

// Defines the exported handler `symbol` for a C function.
#define AB_XLA_HANDLER(symbol, fields, function, workspace)                                        \
  static ::anabranch::xla::ffi::Error symbol##_run(::anabranch::xla::ffi::RemainingArgs operands,  \
                                                   ::anabranch::xla::ffi::RemainingRets results,   \
                                                   ::anabranch::xla::ffi::Dictionary attributes) { \
    return ::anabranch::xla::run(fields, function, workspace, operands, results, attributes);      \
  }                                                                                                \
  extern "C" AB_API XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, symbol##_run,                                              \
                                ::anabranch::xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs())

}  // namespace anabranch::xla
