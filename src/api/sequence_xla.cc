// The custom call "sequence": several C calls, one after another.
//
// A half of a layer's pass over the memory of peers (python/anabranch/jax/parallel/p2p_passes.py) is one custom call,
// because XLA captures each custom call on its own: copies of an exchange that a custom call starts must end in it.
//
// Buffers are numbered: first the operands, then the results, then the views. Attributes:
//
//   calls, call_0, call_1, ...  int32, the number of calls, and a dictionary for each call
//   workspace                   int32, the buffer that is the workspace of all calls; -1: none
//   exchanges                   optional dictionary of the names of exchanges (ab_cuda_exchange_register), by keys
//   views, view_0, ...          optional int32, and a dictionary for each view of a buffer of an exchange: exchange (a
//                               key), buffer (int32), dtype (int32, ab_dtype), shape ("64,16")
//
// The dictionary of a call contains all of its options by the names of their fields, and
//
//   function  the name of the operation, for example "plan"
//   tensors   the buffer of each tensor, for example "x=0,out=3"
//   orders    optional, as in core/xla.h
//   fp4       optional, as in core/xla.h
//   per_rank  optional, for example "first_expert:tokens": this option is multiplied by the rank of this exchange
//
// An option that is an exchange, such as `arriving`, is the key of that exchange.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/tensor.h"
#include "core/xla.h"

#ifdef ANABRANCH_CUDA
#include "anabranch/exchange.h"
#include "exchange/registry.h"
#endif

namespace anabranch::xla {

namespace operations {

extern const Operation plan;
extern const Operation expert_ffn_forward;
extern const Operation expert_ffn_backward;
extern const Operation grouped_matmul_combine;
#ifdef ANABRANCH_CUDA
extern const Operation exchange_all_gather;
extern const Operation exchange_all_to_all;
extern const Operation exchange_release;
extern const Operation exchange_sum;
#endif

}  // namespace operations

namespace {

// The operations that a sequence can run.
const Operation* find_operation(std::string_view name) {
  static const Operation* const all[] = {
      &operations::plan,
      &operations::expert_ffn_forward,
      &operations::expert_ffn_backward,
      &operations::grouped_matmul_combine,
#ifdef ANABRANCH_CUDA
      &operations::exchange_all_gather,
      &operations::exchange_all_to_all,
      &operations::exchange_release,
      &operations::exchange_sum,
#endif
  };
  for (const Operation* operation : all) {
    if (operation->name == name) return operation;
  }
  return nullptr;
}

// Parses a number of digits only.
template <class T>
bool parse(std::string_view text, T* number) {
  *number = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9') return false;
    if (__builtin_mul_overflow(*number, T{10}, number) || __builtin_add_overflow(*number, digit - '0', number)) {
      return false;
    }
  }
  return !text.empty();
}

// Splits "LEFT?RIGHT" at the first separator.
bool split(std::string_view text, char separator, std::string_view* left, std::string_view* right) {
  const size_t at = text.find(separator);
  if (at == std::string_view::npos) return false;
  *left = text.substr(0, at);
  *right = text.substr(at + 1);
  return true;
}

ffi::Error malformed(const std::string& where, std::string_view got, const char* expected) {
  return invalid("sequence: " + where + ": got \"" + std::string(got) + "\", expected " + expected);
}

// Parses a shape such as "64,16" and checks that its elements fit `capacity` bytes.
bool parse_shape(std::string_view text, int64_t capacity, ab_tensor* view) {
  int64_t bytes = dtype_size(view->dtype);
  while (!text.empty()) {
    int64_t size = 0;
    if (view->rank == AB_MAX_RANK || !parse(take_name(text), &size)) return false;
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
    view->shape[view->rank++] = size;
  }
  return bytes <= capacity;
}

class Sequence {
 public:
  Sequence(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, const ffi::Dictionary& attributes)
      : operands_(operands), results_(results), attributes_(attributes) {}

  ffi::Error run(void* stream) {
    if (ffi::Error error = read_buffers(); error.failure()) return error;
    const auto calls = attributes_.get<int32_t>("calls");
    if (!calls.has_value() || *calls < 1) return invalid("sequence: got no calls, expected at least one");
    ffi::Error error = run_calls(*calls, stream);
#ifdef ANABRANCH_CUDA
    // The calls so far still read the arrays. An earlier error is the one to report.
    for (ab_exchange* exchange : exchanges_) {
      if (error.failure()) exchange::abandon_calls(exchange, stream);
    }
#endif
    return error;
  }

 private:
  ffi::Error run_calls(int32_t calls, void* stream) {
    for (int32_t i = 0; i < calls; ++i) {
      const std::string where = "call_" + std::to_string(i);
      const auto call = attributes_.get<ffi::Dictionary>(where);
      if (!call.has_value()) return malformed(where, "", "a dictionary");
      if (ffi::Error error = run_call(where, *call, stream); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error read_buffers() {
    for (size_t i = 0; i < operands_.size(); ++i) {
      const auto buffer = operands_.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return invalid("sequence: got an operand that is not an array");
      buffers_.push_back(view_of(*buffer));
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      auto buffer = results_.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return invalid("sequence: got a result that is not an array");
      buffers_.push_back(view_of(**buffer));
    }
    const auto workspace = attributes_.get<int32_t>("workspace");
    if (!workspace.has_value() || *workspace < -1 || *workspace >= static_cast<int32_t>(buffers_.size())) {
      return invalid("sequence: workspace: expected the number of an operand or a result, or -1");
    }
    if (*workspace >= 0) workspace_ = buffers_[*workspace];
    if (workspace_.dtype != 0 && (workspace_.dtype != AB_UINT8 || workspace_.rank != 1)) {
      return invalid("sequence: workspace: expected an array of bytes");
    }
    const auto views = attributes_.get<int32_t>("views");
    for (int32_t i = 0; views.has_value() && i < *views; ++i) {
      const std::string where = "view_" + std::to_string(i);
      const auto view = attributes_.get<ffi::Dictionary>(where);
      if (!view.has_value()) return malformed(where, "", "a dictionary");
      if (ffi::Error error = read_view(where, *view); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error read_view(const std::string& where, const ffi::Dictionary& attributes) {
    const auto key = attributes.get<std::string_view>("exchange");
    const auto shape = attributes.get<std::string_view>("shape");
    const auto dtype = attributes.get<int32_t>("dtype");
    const auto buffer = attributes.get<int32_t>("buffer");
    if (!key.has_value() || !shape.has_value() || !dtype.has_value() || !buffer.has_value()) {
      return malformed(where, "", "exchange, buffer, dtype and shape");
    }
    if (*dtype < AB_BOOL || *dtype > AB_FLOAT8_E4M3) return malformed(where, std::to_string(*dtype), "an ab_dtype");
    ab_exchange* exchange = nullptr;
    if (ffi::Error error = find(where, *key, &exchange); error.failure()) return error;
    ab_tensor view{};
    view.dtype = *dtype;
    int64_t capacity = 0;
#ifdef ANABRANCH_CUDA
    const ab_status status = ab_cuda_exchange_buffer(exchange, *buffer, &view.data, &capacity);
    if (status.code != AB_OK) return to_error(status);
#endif
    if (!parse_shape(*shape, capacity, &view)) return malformed(where, *shape, "a shape that fits the buffer");
    buffers_.push_back(view);
    return ffi::Error::Success();
  }

  // The exchange with this key.
  ffi::Error find(const std::string& where, std::string_view key, ab_exchange** exchange) {
    const auto exchanges = attributes_.get<ffi::Dictionary>("exchanges");
    if (!exchanges.has_value()) return malformed(where, key, "the key of an exchange");
    const auto name = exchanges->get<std::string_view>(key);
    if (!name.has_value()) return malformed(where, key, "the key of an exchange");
#ifdef ANABRANCH_CUDA
    if (ffi::Error error = to_error(exchange::find_exchange(*name, exchange)); error.failure()) return error;
    if (std::ranges::find(exchanges_, *exchange) == exchanges_.end()) exchanges_.push_back(*exchange);
    return ffi::Error::Success();
#else
    *exchange = nullptr;
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "sequence: " + where + ": got an exchange on the CPU, expected a GPU");
#endif
  }

  ffi::Error run_call(const std::string& where, const ffi::Dictionary& attributes, void* stream) {
    const auto function = attributes.get<std::string_view>("function");
    if (!function.has_value()) return malformed(where, "", "the name of a function");
    const Operation* operation = find_operation(*function);
    if (operation == nullptr) return malformed(where, *function, "a function that a sequence can run");
    Arguments arguments(*operation);
    if (ffi::Error error = place_tensors(where, attributes, &arguments); error.failure()) return error;
    if (ffi::Error error = arguments.read_numbers(attributes); error.failure()) return error;
    if (ffi::Error error = place_exchanges(where, *operation, attributes, &arguments); error.failure()) return error;
    if (ffi::Error error = multiply_by_rank(where, attributes, &arguments); error.failure()) return error;
    return xla::run(*operation, arguments, stream, workspace_);
  }

  ffi::Error place_tensors(const std::string& where, const ffi::Dictionary& attributes, Arguments* arguments) const {
    const auto tensors = attributes.get<std::string_view>("tensors");
    if (!tensors.has_value()) return malformed(where, "", "tensors");
    const auto given_orders = attributes.get<std::string_view>("orders");
    const std::string_view orders = given_orders.has_value() ? *given_orders : std::string_view();
    const auto given_fp4 = attributes.get<std::string_view>("fp4");
    const std::string_view fp4 = given_fp4.has_value() ? *given_fp4 : std::string_view();
    std::string_view entries = *tensors;
    while (!entries.empty()) {
      const std::string_view entry = take_name(entries);
      std::string_view name;
      std::string_view number;
      size_t index = 0;
      if (!split(entry, '=', &name, &number) || !parse(number, &index) || index >= buffers_.size()) {
        return malformed(where, entry, "NAME=NUMBER, with the number of a buffer");
      }
      if (!arguments->place(name, buffers_[index], orders, fp4)) {
        return malformed(where, entry, "a tensor of the function, given once, in a valid order of axes");
      }
    }
    return ffi::Error::Success();
  }

  ffi::Error place_exchanges(const std::string& where, const Operation& operation, const ffi::Dictionary& attributes,
                             Arguments* arguments) {
    for (const Field& field : operation.fields) {
      if (field.kind != FieldKind::exchange || !attributes.contains(field.name)) continue;
      const auto key = attributes.get<std::string_view>(field.name);
      if (!key.has_value()) return malformed(where, field.name, "the key of an exchange");
      auto** const place = static_cast<ab_exchange**>(arguments->field(field.name, FieldKind::exchange));
      if (ffi::Error error = find(where, *key, place); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  // See per_rank above.
  ffi::Error multiply_by_rank(const std::string& where, const ffi::Dictionary& attributes, Arguments* arguments) {
    if (!attributes.contains("per_rank")) return ffi::Error::Success();
    const auto entry = attributes.get<std::string_view>("per_rank");
    std::string_view option;
    std::string_view key;
    void* number = nullptr;
    if (entry.has_value() && split(*entry, ':', &option, &key)) number = arguments->field(option, FieldKind::int32);
    if (number == nullptr) return malformed(where, "per_rank", "OPTION:EXCHANGE, with an integer option");
    ab_exchange* exchange = nullptr;
    if (ffi::Error error = find(where, key, &exchange); error.failure()) return error;
#ifdef ANABRANCH_CUDA
    auto* const multiplied = static_cast<int32_t*>(number);
    if (__builtin_mul_overflow(*multiplied, exchange::rank_of(*exchange), multiplied)) {
      return malformed(where, "per_rank", "a product below 2^31");
    }
#endif
    return ffi::Error::Success();
  }

  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  std::vector<ab_tensor> buffers_;
  std::vector<ab_exchange*> exchanges_;  // that the calls so far use
  ab_tensor workspace_{};
};

#ifdef ANABRANCH_CUDA

ffi::Error run_sequence(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                        ffi::Dictionary attributes) {
  return Sequence(operands, results, attributes).run(stream);
}

#else

ffi::Error run_sequence(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  prepare_results(results);
  return Sequence(operands, results, attributes).run(nullptr);
}

#endif

}  // namespace
}  // namespace anabranch::xla

AB_XLA_SYMBOL(sequence, anabranch::xla::run_sequence);
