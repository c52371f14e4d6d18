// The custom calls of exchanges, and the operations of exchanges that a sequence (api/sequence_xla.cc) can run. Only
// the CUDA library has them.
//
//     all_gather: x [n, ...]   -> out [P n, ...], order [1]
//     all_to_all: x [P n, ...] -> out [P n, ...], order [1]
//
// The attribute "exchange" is the name of an exchange (ab_cuda_exchange_register). A call may have a second operand,
// the result `order` of an earlier call: XLA then runs the two calls one after another, as calls on one exchange must
// be. The memory of `order` is neither read nor written.
#ifdef ANABRANCH_CUDA

#include "anabranch/exchange.h"

#include "core/xla.h"
#include "exchange/registry.h"

namespace {

namespace ffi = ::anabranch::xla::ffi;
using anabranch::xla::to_error;

// A buffer as bytes [n, bytes / n].
ab_tensor bytes_of(const ffi::AnyBuffer& buffer) {
  ab_tensor view{};
  view.data = buffer.untyped_data();
  view.dtype = AB_UINT8;
  view.rank = 2;
  const int64_t rows = buffer.dimensions().size() == 0 ? 1 : buffer.dimensions()[0];
  view.shape[0] = rows;
  view.shape[1] = rows == 0 ? 0 : static_cast<int64_t>(buffer.size_bytes()) / rows;
  return view;
}

template <class Args>
ffi::Error call(ab_status (*function)(const Args*, const ab_exec*), void* stream, const ffi::AnyBuffer& x,
                const ffi::AnyBuffer& out, std::string_view name) {
  Args args{};
  args.size = sizeof(Args);
  const ab_status found = anabranch::exchange::find_exchange(name, &args.exchange);
  if (found.code != AB_OK) return to_error(found);
  const ab_tensor given = bytes_of(x);
  const ab_tensor result = bytes_of(out);
  args.x = &given;
  args.out = &result;
  const ab_exec exec{sizeof(ab_exec), 0, stream, nullptr, 0};
  return to_error(function(&args, &exec));
}

ffi::Error all_gather(void* stream, ffi::AnyBuffer x, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer>, std::string_view name) {
  return call(ab_cuda_exchange_all_gather, stream, x, *out, name);
}

ffi::Error all_to_all(void* stream, ffi::AnyBuffer x, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer>, std::string_view name) {
  return call(ab_cuda_exchange_all_to_all, stream, x, *out, name);
}

using anabranch::xla::Field;

constexpr Field kAllGatherFields[] = {
    AB_EXCHANGE(ab_exchange_all_gather_args, exchange), AB_INT32(ab_exchange_all_gather_args, buffer),
    AB_INT32(ab_exchange_all_gather_args, part),        AB_TENSOR(ab_exchange_all_gather_args, x),
    AB_TENSOR(ab_exchange_all_gather_args, out),
};

constexpr Field kAllToAllFields[] = {
    AB_EXCHANGE(ab_exchange_all_to_all_args, exchange), AB_INT32(ab_exchange_all_to_all_args, buffer),
    AB_INT32(ab_exchange_all_to_all_args, part),        AB_TENSOR(ab_exchange_all_to_all_args, x),
    AB_TENSOR(ab_exchange_all_to_all_args, out),
};

constexpr Field kReleaseFields[] = {
    AB_EXCHANGE(ab_exchange_release_args, exchange),
    AB_INT32(ab_exchange_release_args, buffer),
};

constexpr Field kSumFields[] = {
    AB_EXCHANGE(ab_exchange_sum_args, exchange), AB_INT32(ab_exchange_sum_args, buffer),
    AB_FLOAT(ab_exchange_sum_args, factor),      AB_TENSOR(ab_exchange_sum_args, sums),
    AB_TENSOR(ab_exchange_sum_args, addend),     AB_TENSOR(ab_exchange_sum_args, out),
};

}  // namespace

AB_XLA_OPERATION(exchange_all_gather, kAllGatherFields, nullptr)
AB_XLA_OPERATION(exchange_all_to_all, kAllToAllFields, nullptr)
AB_XLA_OPERATION(exchange_release, kReleaseFields, nullptr)
AB_XLA_OPERATION(exchange_sum, kSumFields, nullptr)

#define AB_XLA_EXCHANGE(name)                                                       \
  extern "C" AB_API XLA_FFI_Error* ab_cuda_xla_exchange_##name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(ab_cuda_xla_exchange_##name, name,                  \
                                ffi::Ffi::Bind()                                    \
                                    .Ctx<ffi::PlatformStream<void*>>()              \
                                    .Arg<ffi::AnyBuffer>()                          \
                                    .RemainingArgs()                                \
                                    .Ret<ffi::AnyBuffer>()                          \
                                    .Ret<ffi::AnyBuffer>()                          \
                                    .Attr<std::string_view>("exchange"),            \
                                {ffi::Traits::kCmdBufferCompatible})

AB_XLA_EXCHANGE(all_gather);
AB_XLA_EXCHANGE(all_to_all);

#endif  // ANABRANCH_CUDA
