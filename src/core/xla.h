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
#include <span>
#include <string>
#include <string_view>

#include "anabranch/types.h"
#ifdef ANABRANCH_CUDA
#include "anabranch/cuda.h"
#endif
#include "xla/ffi/api/ffi.h"

namespace anabranch::xla {

namespace ffi = ::xla::ffi;

enum class FieldKind { tensor, int32, float32, exchange };

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

// An exchange (exchange.h). Only a call of a sequence (api/sequence_xla.cc) can give one.
#define AB_EXCHANGE(type, name) \
  ::anabranch::xla::Field { #name, offsetof(type, name), ::anabranch::xla::FieldKind::exchange, true }

constexpr int kMaxBuffers = 48;
constexpr size_t kMaxArgsBytes = 1024;

// A C function with its fields.
struct Operation {
  std::string_view name;
  std::span<const Field> fields;
  size_t args_bytes;
  ab_status (*function)(const void* args, const ab_exec* exec);
  // The bytes of the workspace; nullptr: the caller knows them, or the function needs none.
  ab_status (*workspace)(const void* args, const ab_exec* exec, size_t* bytes);
};

// A C function without the type of its arguments.
template <auto function>
struct Untyped;

template <class Args, ab_status (*function)(const Args*, const ab_exec*)>
struct Untyped<function> {
  static_assert(sizeof(Args) <= kMaxArgsBytes, "Arguments has room for the struct");
  static constexpr size_t kBytes = sizeof(Args);
  static ab_status call(const void* args, const ab_exec* exec) {
    return function(static_cast<const Args*>(args), exec);
  }
};

template <class Args, ab_status (*function)(const Args*, const ab_exec*, size_t*)>
struct Untyped<function> {
  static ab_status call(const void* args, const ab_exec* exec, size_t* bytes) {
    return function(static_cast<const Args*>(args), exec, bytes);
  }
};

template <>
struct Untyped<nullptr> {
  static constexpr ab_status (*call)(const void*, const ab_exec*, size_t*) = nullptr;
};

// The arguments of a call while they are decoded.
class Arguments {
 public:
  explicit Arguments(const Operation& operation);

  // Gives a tensor, with its axes in the order that `orders` has for this name. Returns false if the operation has no
  // such tensor, if it is already given, if the order is invalid, or if there is no room.
  bool place(std::string_view name, const ab_tensor& tensor, std::string_view orders, std::string_view fp4);

  // Reads all numbers.
  ffi::Error read_numbers(const ffi::Dictionary& attributes);

  // The field with this name and kind in the struct; nullptr if there is none.
  void* field(std::string_view name, FieldKind kind);

  const void* get() const { return args_; }

 private:
  // A tensor view with memory for its strides.
  struct View {
    ab_tensor tensor;
    int64_t strides[AB_MAX_RANK];
  };
  static bool reorder(std::string_view orders, std::string_view name, View* view);

  const Operation& operation_;
  alignas(std::max_align_t) char args_[kMaxArgsBytes];
  View views_[kMaxBuffers];
  int used_ = 0;
};

// The view of a buffer.
ab_tensor view_of(const ffi::AnyBuffer& buffer);

// Removes the name before the first comma from `names` and returns it.
std::string_view take_name(std::string_view& names);

ffi::Error invalid(std::string message);
ffi::Error to_error(const ab_status& status);

// Fills the arguments from one call. A result named "workspace" goes to *workspace.
ffi::Error decode(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                  const ffi::Dictionary& attributes, Arguments* arguments, ab_tensor* workspace);

#ifndef ANABRANCH_CUDA
// Requests huge pages for large results, which are freshly allocated memory.
void prepare_results(const ffi::RemainingRets& results);
#endif

// Runs an operation with decoded arguments. On a GPU its workspace is given: XLA owns the memory, so a command buffer
// can capture the call. On the CPU the workspace is temporary memory, and `stream` and `workspace` are not used.
ffi::Error run(const Operation& operation, const Arguments& arguments, void* stream, const ab_tensor& workspace);

// Decodes and runs one call.
ffi::Error run(const Operation& operation, void* stream, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results, const ffi::Dictionary& attributes);

#ifdef ANABRANCH_CUDA

// Defines anabranch::xla::operations::NAME, which is ab_cuda_NAME. The query of its workspace is not used.
#define AB_XLA_OPERATION(name, fields, query)                                                                   \
  namespace anabranch::xla::operations {                                                                        \
  extern const Operation name;                                                                                  \
  const Operation name{#name, fields, Untyped<ab_cuda_##name>::kBytes, Untyped<ab_cuda_##name>::call, nullptr}; \
  }

// Defines AB_XLA_OPERATION and its exported handler ab_cuda_xla_NAME.
#define AB_XLA_HANDLER(name, fields, query)                                                                   \
  AB_XLA_OPERATION(name, fields, query)                                                                       \
  static ::anabranch::xla::ffi::Error name##_run(void* stream, ::anabranch::xla::ffi::RemainingArgs operands, \
                                                 ::anabranch::xla::ffi::RemainingRets results,                \
                                                 ::anabranch::xla::ffi::Dictionary attributes) {              \
    return ::anabranch::xla::run(::anabranch::xla::operations::name, stream, operands, results, attributes);  \
  }                                                                                                           \
  AB_XLA_SYMBOL(name, name##_run)

// Exports a function of (stream, operands, results, attributes) as ab_cuda_xla_NAME.
#define AB_XLA_SYMBOL(name, function)                                                    \
  extern "C" AB_API XLA_FFI_Error* ab_cuda_xla_##name(XLA_FFI_CallFrame*);               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(ab_cuda_xla_##name, function,                            \
                                ::anabranch::xla::ffi::Ffi::Bind()                       \
                                    .Ctx<::anabranch::xla::ffi::PlatformStream<void*>>() \
                                    .RemainingArgs()                                     \
                                    .RemainingRets()                                     \
                                    .Attrs(),                                            \
                                {::anabranch::xla::ffi::Traits::kCmdBufferCompatible})

#else

// Defines anabranch::xla::operations::NAME, which is ab_NAME. query nullptr: it needs no workspace.
#define AB_XLA_OPERATION(name, fields, query)                                                                      \
  namespace anabranch::xla::operations {                                                                           \
  extern const Operation name;                                                                                     \
  const Operation name{#name, fields, Untyped<ab_##name>::kBytes, Untyped<ab_##name>::call, Untyped<query>::call}; \
  }

// Defines AB_XLA_OPERATION and its exported handler ab_xla_NAME.
#define AB_XLA_HANDLER(name, fields, query)                                                                   \
  AB_XLA_OPERATION(name, fields, query)                                                                       \
  static ::anabranch::xla::ffi::Error name##_run(::anabranch::xla::ffi::RemainingArgs operands,               \
                                                 ::anabranch::xla::ffi::RemainingRets results,                \
                                                 ::anabranch::xla::ffi::Dictionary attributes) {              \
    return ::anabranch::xla::run(::anabranch::xla::operations::name, nullptr, operands, results, attributes); \
  }                                                                                                           \
  AB_XLA_SYMBOL(name, name##_run)

// Exports a function of (operands, results, attributes) as ab_xla_NAME.
#define AB_XLA_SYMBOL(name, function)                                 \
  extern "C" AB_API XLA_FFI_Error* ab_xla_##name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(ab_xla_##name, function,              \
                                ::anabranch::xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs())

#endif

}  // namespace anabranch::xla
