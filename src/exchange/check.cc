#include "exchange/check.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "core/tensor.h"

namespace anabranch::exchange {
namespace {

constexpr double kMaxTimeout = 1e6;  // seconds; in nanoseconds it fits 64 bits
constexpr Dtypes kDtypes = (kAnyDtype & ~kBool) | kE4m3;

ab_status read_timeout(const char* variable, double* seconds) {
  *seconds = kDefaultTimeout;
  if (variable == nullptr || variable[0] == '\0') return ok();
  char* end = nullptr;
  *seconds = std::strtod(variable, &end);
  if (*end == '\0' && *seconds > 0 && *seconds <= kMaxTimeout) return ok();
  return error(AB_UNSUPPORTED, "ANABRANCH_EXCHANGE_TIMEOUT: got %s, expected seconds in (0, %g]", variable,
               kMaxTimeout);
}

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::all_gather: return "all_gather";
    case Operation::all_to_all: return "all_to_all";
    case Operation::small_all_gather: return "all_gather by one kernel";
    case Operation::small_all_to_all: return "all_to_all by one kernel";
    case Operation::returned_sums: return "returned sums";
    default: return "no operation";
  }
}

// The checks that both operations share, once the tensors are known to be valid.
template <class Args>
ab_status check_call(const Args* args, const Shape& shape, const Call& call) {
  const int32_t buffer = args->buffer;
  if (!is_buffer(buffer)) return check_buffer(buffer);
  if (args->lockstep != 0 && args->lockstep != 1) {
    return AB_INVALID("lockstep: got %d, expected 0 or 1", args->lockstep);
  }
  if (args->part < AB_EXCHANGE_WHOLE || args->part > AB_EXCHANGE_FINISH) {
    return AB_INVALID("part: got %d, expected AB_EXCHANGE_WHOLE, AB_EXCHANGE_START or AB_EXCHANGE_FINISH", args->part);
  }
  if (args->reserved != 0) return AB_INVALID("reserved: got %d, expected 0", args->reserved);
  AB_RETURN_IF_ERROR(check_block_bytes("x", call.bytes));
  if (call.bytes * shape.ranks > shape.buffer_bytes[buffer]) {
    return AB_INVALID("x: got %d blocks of %lld bytes, expected at most the %lld bytes of buffer %d", shape.ranks,
                      static_cast<long long>(call.bytes), static_cast<long long>(shape.buffer_bytes[buffer]), buffer);
  }
  return ok();
}

template <class Args>
void fill(const Args* args, Operation operation, Operation small_operation, int64_t bytes, Call* call) {
  const bool is_small =
      bytes <= kSmallBytes && args->out != nullptr && args->part == AB_EXCHANGE_WHOLE && args->lockstep == 0;
  call->operation = is_small ? small_operation : operation;
  call->bytes = bytes;
  call->buffer = args->buffer;
  call->lockstep = args->lockstep == 1;
  call->part = args->part;
  call->x = data<const char>(args->x);
  call->out = data<char>(args->out);
  call->stays_in_buffer = args->out == nullptr;
}

int64_t bytes_of(const ab_tensor& x) { return x.shape[0] * x.shape[1] * dtype_size(x.dtype); }

int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// The further tensors of an all_gather.
ab_status check_more(const ab_exchange_all_gather_args& args, const Shape& shape, Call* call) {
  const struct {
    const char* name;
    const ab_tensor* x;
    const char* out_name;
    const ab_tensor* out;
  } tensors[kMoreTensors] = {{"x_2", args.x_2, "out_2", args.out_2}, {"x_3", args.x_3, "out_3", args.out_3}};
  int64_t needed = padded(shape.ranks * call->bytes);
  for (const auto& [name, x, out_name, out] : tensors) {
    if (x == nullptr && out == nullptr) continue;
    if (call->stays_in_buffer || call->part != AB_EXCHANGE_WHOLE || call->lockstep) {
      return AB_INVALID("%s: got a tensor, expected NULL unless `out` is given, part is WHOLE and lockstep is 0",
                        x == nullptr ? out_name : name);
    }
    AB_RETURN_IF_ERROR(check_tensor(name, x, kDtypes, {{"T"}, {"D"}}));
    AB_RETURN_IF_ERROR(
        check_tensor(out_name, out, 1u << x->dtype, {{"P T", shape.ranks * x->shape[0]}, {"D", x->shape[1]}}));
    const int64_t bytes = bytes_of(*x);
    AB_RETURN_IF_ERROR(check_block_bytes(name, bytes));
    call->more[call->num_more++] = {data<const char>(x), data<char>(out), bytes, needed};
    needed += padded(shape.ranks * bytes);
  }
  if (call->num_more == 0) return ok();
  const int32_t buffer = call->buffer;
  if (!is_buffer(buffer)) return check_buffer(buffer);
  if (needed > shape.buffer_bytes[buffer]) {
    return AB_INVALID(
        "x_2, x_3: got tensors that need %lld bytes together with x, expected at most the %lld bytes of "
        "buffer %d",
        static_cast<long long>(needed), static_cast<long long>(shape.buffer_bytes[buffer]), buffer);
  }
  call->operation = Operation::small_all_gather;
  return ok();
}

}  // namespace

ab_status check_create(const ab_exchange_create_args* args, const char* variable, Shape* shape, uint64_t* limit) {
  if (args->ranks < 1 || args->ranks > kMaxRanks) {
    return AB_INVALID("ranks: got %d, expected an integer in [1, %d]", args->ranks, kMaxRanks);
  }
  if (args->rank < 0 || args->rank >= args->ranks) {
    return AB_INVALID("rank: got %d, expected an integer in [0, ranks=%d)", args->rank, args->ranks);
  }
  if (args->device < 0) return AB_INVALID("device: got %d, expected the number of a device", args->device);
  shape->rank = args->rank;
  shape->ranks = args->ranks;
  for (int b = 0; b < kBuffers; ++b) {
    const int64_t bytes = args->buffer_bytes[b];
    if (bytes < 0 || bytes > kMaxBytes) {
      return AB_INVALID("buffer_bytes[%d]: got %lld, expected 0 to 2^56", b, static_cast<long long>(bytes));
    }
    shape->buffer_bytes[b] = bytes;
  }
  double seconds = args->timeout;
  if (!(seconds >= 0 && seconds <= kMaxTimeout)) {
    return AB_INVALID("timeout: got %g, expected seconds in (0, %g], or 0 for the default", seconds, kMaxTimeout);
  }
  if (seconds == 0) AB_RETURN_IF_ERROR(read_timeout(variable, &seconds));
  *limit = static_cast<uint64_t>(std::ceil(seconds * 1e9));
  return ok();
}

ab_status check_buffer(int32_t buffer, const char* name) {
  if (is_buffer(buffer)) return ok();
  return AB_INVALID("%s: got %d, expected an integer in [0, %d)", name, buffer, kBuffers);
}

ab_status check_block_bytes(const char* name, int64_t bytes) {
  if (bytes <= kMaxBlockBytes) return ok();
  return error(AB_UNSUPPORTED, "%s: got blocks of %lld bytes, expected at most %lld", name,
               static_cast<long long>(bytes), static_cast<long long>(kMaxBlockBytes));
}

ab_status check_all_gather(const ab_exchange_all_gather_args* args, const Shape& shape, Call* call) {
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kDtypes, {{"T"}, {"D"}}));
  AB_RETURN_IF_ERROR(check_optional("out", args->out, 1u << args->x->dtype,
                                    {{"P T", shape.ranks * args->x->shape[0]}, {"D", args->x->shape[1]}}));
  fill(args, Operation::all_gather, Operation::small_all_gather, bytes_of(*args->x), call);
  AB_RETURN_IF_ERROR(check_call(args, shape, *call));
  return check_more(*args, shape, call);
}

ab_status check_all_to_all(const ab_exchange_all_to_all_args* args, const Shape& shape, Call* call) {
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kDtypes, {{"P T"}, {"D"}}));
  const int64_t rows = args->x->shape[0];
  if (rows % shape.ranks != 0) {
    return AB_INVALID("x: got %lld rows, expected a multiple of the ranks P=%d", static_cast<long long>(rows),
                      shape.ranks);
  }
  AB_RETURN_IF_ERROR(check_optional("out", args->out, 1u << args->x->dtype, {{"P T", rows}, {"D", args->x->shape[1]}}));
  fill(args, Operation::all_to_all, Operation::small_all_to_all, bytes_of(*args->x) / shape.ranks, call);
  call->stride = call->bytes;
  return check_call(args, shape, *call);
}

ab_status check_sum(const ab_exchange_sum_args* args, const Shape& shape) {
  if (!std::isfinite(args->factor)) {
    return AB_INVALID("factor: got %g, expected a finite number", static_cast<double>(args->factor));
  }
  AB_RETURN_IF_ERROR(check_buffer(args->buffer));
  AB_RETURN_IF_ERROR(check_tensor("out", args->out, kFloats, {{"T"}, {"D"}}));
  const Axis T{"T", args->out->shape[0]};
  const Axis D{"D", args->out->shape[1]};
  AB_RETURN_IF_ERROR(check_tensor("sums", args->sums, kFloats, {{"P T", shape.ranks * T.size}, D}));
  return check_optional("addend", args->addend, kFloats, {T, D});
}

ab_status status_of(const Report& report, uint64_t limit) {
  const Failure failure = unpack(report.failure);
  const double seconds = static_cast<double>(limit) * 1e-9;
  char where[96];
  std::snprintf(where, sizeof(where), "(use %u of buffer %u, phase %u, noticed by rank %u)", failure.number,
                failure.buffer, failure.phase, failure.noticed_by);
  switch (failure.kind) {
    case FailureKind::none: return ok();
    case FailureKind::not_released:
      return error(AB_INTERNAL, "exchange: rank %u did not connect or release its buffer within %g s %s", failure.rank,
                   seconds, where);
    case FailureKind::not_arrived:
      return error(AB_INTERNAL, "exchange: the block of rank %u did not arrive within %g s %s", failure.rank, seconds,
                   where);
    case FailureKind::unreleased:
      return error(AB_INTERNAL, "exchange: rank %u used its buffer again before ab_cuda_exchange_release %s",
                   failure.rank, where);
    case FailureKind::other_call: break;
  }
  if (report.expected == 0) {
    return error(AB_INTERNAL, "exchange: rank %u made another call than rank %u %s", failure.rank, failure.noticed_by,
                 where);
  }
  return error(AB_INTERNAL, "exchange: rank %u made another call: got %s of %lld bytes, expected %s of %lld bytes %s",
               failure.rank, name_of(operation_of(report.seen)), static_cast<long long>(block_bytes_of(report.seen)),
               name_of(operation_of(report.expected)), static_cast<long long>(block_bytes_of(report.expected)), where);
}

}  // namespace anabranch::exchange
