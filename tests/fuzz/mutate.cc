// Random caller errors: shapes, dtypes, ranks, strides, NULLs, options and struct sizes. Prefers numbers whose products
// overflow.
#include "call.h"

namespace anabranch::fuzz {
namespace {

int64_t odd_size(Random& random) {
  return random.one_of<int64_t>({-1,
                                 0,
                                 1,
                                 2,
                                 3,
                                 8,
                                 127,
                                 128,
                                 129,
                                 INT32_MAX,
                                 int64_t{1} << 31,
                                 int64_t{1} << 32,
                                 int64_t{1} << 40,
                                 (int64_t{1} << 54) + 1,
                                 int64_t{1} << 61,
                                 (int64_t{1} << 61) + 1,
                                 int64_t{1} << 62,
                                 INT64_MAX,
                                 INT64_MAX - 1,
                                 INT64_MIN,
                                 3037000500});
}

bool has_axes(const Operand& operand) { return operand.view.rank > 0 && operand.view.rank <= AB_MAX_RANK; }

void mutate_axis(Random& random, Operand* operand) {
  if (!has_axes(*operand)) return;
  operand->view.shape[random.between(0, operand->view.rank - 1)] = odd_size(random);
}

// Replaces a size everywhere it occurs, so that the shapes may still match.
void mutate_size(Random& random, Call* call) {
  const Operand& operand = call->operands[random.bits() % call->operands.size()];
  if (!has_axes(operand)) return;
  const int64_t from = operand.view.shape[random.between(0, operand.view.rank - 1)];
  const int64_t to = odd_size(random);
  for (Operand& other : call->operands) {
    for (int64_t& size : other.view.shape) {
      if (size == from) size = to;
    }
  }
}

void mutate_strides(Random& random, Operand* operand) {
  operand->strides.assign(AB_MAX_RANK, 0);
  uint64_t stride = 1;
  for (int32_t i = has_axes(*operand) ? operand->view.rank - 1 : -1; i >= 0; --i) {
    operand->strides[static_cast<size_t>(i)] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(operand->view.shape[i]);
  }
  if (random.chance(0.5)) operand->strides[random.bits() % AB_MAX_RANK] = odd_size(random);
  operand->view.strides = operand->strides.data();
}

void mutate_once(Random& random, Call* call) {
  Operand& operand = call->operands[random.bits() % call->operands.size()];
  switch (random.between(0, 9)) {
    case 0:
    case 1: return mutate_axis(random, &operand);
    case 2: return mutate_size(random, call);
    case 3:
      operand.view.dtype = random.chance(0.7) ? static_cast<int32_t>(random.between(AB_BOOL, AB_FLOAT8_E4M3))
                                              : random.one_of<int32_t>({0, -1, 10, 11, 32, INT32_MAX, INT32_MIN});
      return;
    case 4: operand.view.rank = random.one_of<int32_t>({0, 1, 2, 3, 4, 5, 6, 7, -1, INT32_MAX, INT32_MIN}); return;
    case 5: *operand.field = nullptr; return;
    case 6: *operand.field = &operand.view; return;
    case 7: return mutate_strides(random, &operand);
    case 8: {
      const size_t count = call->options.size() + call->numbers.size();
      if (count == 0) return;
      const size_t i = random.bits() % count;
      if (i < call->options.size()) {
        *call->options[i].second = random.chance(0.5) ? static_cast<int32_t>(random.between(-2, 9))
                                                      : random.one_of<int32_t>({INT32_MAX, INT32_MIN, 1 << 30, 65536});
      } else {
        *call->numbers[i - call->options.size()].second =
            random.one_of({0.0f, 0.1f, 3.0f, -1.0f, 1.0f / 0.0f, -1.0f / 0.0f, __builtin_nanf(""), 3e38f, 1e-45f});
      }
      return;
    }
    default: call->size() = any_struct_size(random, call->size());
  }
}

}  // namespace

size_t any_struct_size(Random& random, size_t size) {
  if (random.chance(0.8)) return static_cast<size_t>(random.between(0, static_cast<int64_t>(size) + 64));
  return random.one_of<size_t>({4088, 4095, 4096, 4097, 4104, SIZE_MAX});
}

void mutate(Random& random, Call* call) {
  if (random.chance(0.4)) return;
  call->mutated = true;
  for (int64_t times = random.between(1, 3); times > 0; --times) mutate_once(random, call);
  call->cut();
}

}  // namespace anabranch::fuzz
