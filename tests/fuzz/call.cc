#include "call.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>

namespace anabranch::fuzz {
namespace {

bool has_rank(const ab_tensor& view) { return view.rank >= 0 && view.rank <= AB_MAX_RANK; }

void fill_garbage(char* to, size_t bytes, uint64_t seed) {
  Random random(seed);
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = random.bits();
    std::memcpy(to + i, &word, std::min(sizeof(word), bytes - i));
  }
}

template <class T>
void put(char* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

// extreme: also the largest and smallest numbers of a dtype.
enum class SpecialNumbers { nan_and_zeros, infinities, extreme };

uint16_t float16_bits(Random& random, bool special, SpecialNumbers which) {
  if (!special) {
    return static_cast<uint16_t>(random.between(0x2c00, 0x4400) | (random.chance(0.5) ? 0x8000 : 0));  // 2^-4 to 4
  }
  switch (which) {
    case SpecialNumbers::nan_and_zeros: return random.one_of<uint16_t>({0x7e00, 0, 0x8000});
    case SpecialNumbers::infinities: return random.one_of<uint16_t>({0x7e00, 0x7c00, 0xfc00, 0, 0x8000});
    default: return static_cast<uint16_t>(random.bits());
  }
}

float float32_value(Random& random, bool special, SpecialNumbers which) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (!special) return static_cast<float>(random.between(-4096, 4096)) / 1024.0f;
  switch (which) {
    case SpecialNumbers::nan_and_zeros: return random.one_of({kNan, 0.0f, -0.0f});
    case SpecialNumbers::infinities: return random.one_of({kNan, kInfinity, -kInfinity, 0.0f, -0.0f});
    default: return random.one_of({kNan, kInfinity, -kInfinity, 0.0f, -0.0f, 1e-42f, -3e38f, 88.0f, -88.0f, -1e4f});
  }
}

// Mostly 2^-5 to 1.
char scale_bits(Random& random, bool special, SpecialNumbers which) {
  if (!special) return static_cast<char>(random.between(122, 127));
  return which == SpecialNumbers::extreme ? static_cast<char>(random.bits()) : static_cast<char>(255);
}

int64_t index_value(Random& random, int64_t limit, bool special) {
  if (!special) return random.between(-1, std::max<int64_t>(limit, 0));
  return random.one_of<int64_t>({INT32_MIN, INT32_MAX, -2, limit + 1, static_cast<int32_t>(random.bits())});
}

// specials: fraction of the elements that are special numbers.
void fill_values(Random& random, double specials, SpecialNumbers which, const Operand& operand,
                 std::vector<char>* content) {
  const size_t size = element_size(operand.view.dtype);
  for (size_t i = 0; i + size <= content->size(); i += size) {
    char* to = content->data() + i;
    const bool special = specials > 0 && random.chance(specials);
    switch (operand.view.dtype) {
      case AB_FLOAT32: put(to, float32_value(random, special, which)); break;
      case AB_BFLOAT16: {
        const float value = float32_value(random, special, which);
        std::memcpy(to, reinterpret_cast<const char*>(&value) + 2, 2);
        break;
      }
      case AB_FLOAT16: put(to, float16_bits(random, special, which)); break;
      case AB_INT64: put(to, index_value(random, operand.limit, special)); break;
      case AB_INT32: put(to, static_cast<int32_t>(index_value(random, operand.limit, special))); break;
      case AB_INT16: put(to, static_cast<int16_t>(index_value(random, operand.limit, special))); break;
      case AB_BOOL: *to = random.chance(0.5) ? 1 : 0; break;
      case AB_FLOAT8_E8M0: *to = scale_bits(random, special, which); break;
      default: *to = static_cast<char>(random.bits()); break;
    }
    // Clear the sign of a negative float; replace a negative index by 0.
    if (operand.nonnegative && (to[size - 1] & 0x80) != 0) {
      if (operand.view.dtype >= AB_FLOAT16) {
        to[size - 1] = static_cast<char>(to[size - 1] & 0x7f);
      } else if (operand.view.dtype >= AB_INT16) {
        std::fill_n(to, size, 0);
      }
    }
  }
}

// Replaces repeated int32 values by -1.
void make_distinct(std::vector<char>* content) {
  std::set<int32_t> seen;
  for (size_t i = 0; i + sizeof(int32_t) <= content->size(); i += sizeof(int32_t)) {
    int32_t index = 0;
    std::memcpy(&index, content->data() + i, sizeof(index));
    if (!seen.insert(index).second) put(content->data() + i, int32_t{-1});
  }
}

}  // namespace

size_t element_size(int32_t dtype) {
  switch (dtype) {
    case AB_BOOL:
    case AB_UINT8:
    case AB_FLOAT4_E2M1X2:
    case AB_FLOAT8_E8M0:
    case AB_FLOAT8_E4M3: return 1;
    case AB_INT16:
    case AB_FLOAT16:
    case AB_BFLOAT16: return 2;
    case AB_INT64: return 8;
    default: return 4;
  }
}

bool has_elements(const ab_tensor& view) {
  return has_rank(view) && std::find(view.shape, view.shape + view.rank, 0) == view.shape + view.rank;
}

int64_t small_bytes(const ab_tensor& view) {
  constexpr int64_t kMaxBytes = 1 << 23;
  if (!has_rank(view)) return -1;
  if (!has_elements(view)) return 0;
  const auto element = static_cast<int64_t>(element_size(view.dtype));
  int64_t elements = 1;  // of the row-major tensor
  int64_t last = 0;      // offset of the last element
  for (int32_t i = 0; i < view.rank; ++i) {
    const int64_t size = view.shape[i];
    if (size < 0 || size > kMaxBytes || elements * size > kMaxBytes) return -1;
    elements *= size;
    const int64_t stride = view.strides == nullptr || size == 1 ? 0 : view.strides[i];
    if (stride < 0 || stride > kMaxBytes || last + (size - 1) * stride > kMaxBytes) return -1;
    last += (size - 1) * stride;
  }
  const bool is_packed = view.dtype == AB_FLOAT4_E2M1X2;  // two elements per byte
  const int64_t bytes = (std::max(elements, last + 1) + (is_packed ? 1 : 0)) / (is_packed ? 2 : 1) * element;
  return bytes > kMaxBytes ? -1 : bytes;
}

Operand& Call::input(const char* name, const ab_tensor** field, int32_t dtype, std::vector<int64_t> shape,
                     int64_t limit) {
  Operand& operand = operands.emplace_back();
  operand.name = name;
  operand.field = field;
  operand.limit = limit;
  operand.view.dtype = dtype;
  operand.view.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), operand.view.shape);
  *field = &operand.view;
  return operand;
}

Operand& Call::output(const char* name, const ab_tensor** field, int32_t dtype, std::vector<int64_t> shape) {
  Operand& operand = input(name, field, dtype, std::move(shape));
  operand.output = true;
  return operand;
}

void Call::cut() {
  for (Operand& operand : operands) {
    const auto offset = reinterpret_cast<const char*>(operand.field) - reinterpret_cast<const char*>(args_.data());
    if (static_cast<size_t>(offset) >= size()) *operand.field = nullptr;
  }
}

std::vector<char> Call::args() const {
  constexpr size_t kMaxStructBytes = 4096;
  const size_t claimed = *reinterpret_cast<const size_t*>(args_.data());
  std::vector<char> bytes(std::clamp(claimed, sizeof(size_t), kMaxStructBytes), 0);
  std::memcpy(bytes.data(), args_.data(), std::min(bytes.size(), args_size));
  return bytes;
}

// Lets an input share memory with an earlier input.
bool Call::share(Random& random, Operand* operand) {
  const size_t bytes = static_cast<size_t>(small_bytes(operand->view));
  for (Operand& other : operands) {
    if (&other == operand) return false;
    const bool fits = !other.output && other.view.dtype == operand->view.dtype && other.content.size() >= bytes;
    if (!fits || bytes == 0 || !random.chance(0.1) || is_aliased_by_output(other)) continue;
    const size_t size = element_size(operand->view.dtype);
    const auto last = static_cast<int64_t>((other.content.size() - bytes) / size);
    operand->view.data = other.memory.data() + static_cast<size_t>(random.between(0, last)) * size;
    return true;
  }
  return false;
}

void Call::allocate(Random& random) {
  const bool has_specials = random.chance(0.2);
  is_extreme = has_specials && (mutated || random.chance(0.5));
  const SpecialNumbers which = is_extreme       ? SpecialNumbers::extreme
                               : has_infinities ? SpecialNumbers::infinities
                                                : SpecialNumbers::nan_and_zeros;
  for (Operand& operand : operands) {
    if (mutated) operand.in = nullptr;  // the mutated shapes may no longer match
    if (operand.in != nullptr) {
      operand.view.data = operand.in->view.data;
      continue;
    }
    const int64_t bytes = small_bytes(operand.view);
    if (bytes < 0 || (bytes == 0 && random.chance(0.5))) continue;
    const bool may_share = !operand.output && !operand.distinct && !operand.derive && !is_aliased_by_output(operand);
    if (may_share && share(random, &operand)) continue;
    const size_t size = element_size(operand.view.dtype);
    const size_t shift = random.chance(0.5) ? static_cast<size_t>(random.between(1, 15)) * size : 0;
    operand.memory.allocate(static_cast<size_t>(bytes), shift);
    operand.view.data = operand.memory.data();
    operand.content.resize(static_cast<size_t>(bytes));
    if (operand.output && !operand.keeps_content()) continue;
    const bool is_number = operand.view.dtype >= AB_FLOAT16;
    const bool may_be_special = has_specials && (is_extreme || !operand.finite);
    const bool special = is_number ? may_be_special && random.chance(0.5) : random.chance(0.2);
    fill_values(random, special ? 0.1 : 0.0, which, operand, &operand.content);
    if (operand.distinct) make_distinct(&operand.content);
    if (operand.derive && !mutated) operand.derive(operand.content.data());
  }
}

bool Call::is_aliased_by_output(const Operand& operand) const {
  return std::any_of(operands.begin(), operands.end(),
                     [&](const Operand& other) { return other.in == &operand && other.is_given(); });
}

void Call::reset(uint64_t garbage) {
  for (Operand& operand : operands) {
    if (operand.content.empty()) continue;
    if (operand.output && !operand.keeps_content()) {
      fill_garbage(operand.memory.data(), operand.content.size(), garbage);
    } else {
      std::memcpy(operand.memory.data(), operand.content.data(), operand.content.size());
    }
  }
}

const Operand* Call::changed_input() const {
  for (const Operand& operand : operands) {
    if (operand.output || is_aliased_by_output(operand) || operand.content.empty()) continue;
    if (std::memcmp(operand.memory.data(), operand.content.data(), operand.content.size()) != 0) return &operand;
  }
  return nullptr;
}

const Operand* Call::written_output(uint64_t garbage) const {
  std::vector<char> expected;
  for (const Operand& operand : operands) {
    if (!operand.output || operand.content.empty()) continue;
    expected = operand.content;
    if (!operand.keeps_content()) fill_garbage(expected.data(), expected.size(), garbage);
    if (std::memcmp(operand.memory.data(), expected.data(), expected.size()) != 0) return &operand;
  }
  return nullptr;
}

std::vector<std::vector<char>> Call::results() const {
  std::vector<std::vector<char>> results;
  for (const Operand& operand : operands) {
    if (!operand.is_compared()) continue;
    const Operand& owner = operand.in == nullptr ? operand : *operand.in;
    results.emplace_back(owner.memory.data(), owner.memory.data() + owner.content.size());
  }
  return results;
}

const Operand* Call::overrun() const {
  const auto found = std::find_if(operands.begin(), operands.end(),
                                  [](const Operand& operand) { return !operand.memory.is_intact(); });
  return found == operands.end() ? nullptr : &*found;
}

std::string Call::text() const {
  std::string text = operation->name;
  for (const Operand& operand : operands) {
    if (!operand.is_given()) continue;
    text += "\n  " + operand.name + ": dtype " + std::to_string(operand.view.dtype) + " rank " +
            std::to_string(operand.view.rank) + " [";
    for (int32_t i = 0; i < operand.view.rank && i < AB_MAX_RANK; ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(operand.view.shape[i]);
    }
    text += std::string("]") + (operand.view.data == nullptr ? " data NULL" : "") +
            (operand.view.strides == nullptr ? "" : " strides");
  }
  for (const auto& [name, value] : options) text += std::string("\n  ") + name + " " + std::to_string(*value);
  for (const auto& [name, value] : numbers) text += std::string("\n  ") + name + " " + std::to_string(*value);
  return text + "\n  size " + std::to_string(*reinterpret_cast<const size_t*>(args_.data()));
}

}  // namespace anabranch::fuzz
