// What the random calls of all operations share: names, dtypes and sizes. On the emulated GPU sizes are smaller, and
// there is no FP8, which requires Hopper's tensor cores.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"

namespace anabranch::fuzz {

using Shape = std::vector<int64_t>;

// Expands to the name of an argument and its field.
#define ARGUMENT(field) #field, &args->field

inline int32_t any_float(Random& random) { return random.one_of<int32_t>({AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}); }
inline int32_t any_dtype(Random& random) { return static_cast<int32_t>(random.between(AB_BOOL, AB_FLOAT32)); }
inline int32_t any_count(Random& random) {
  return random.one_of<int32_t>({AB_UINT8, AB_INT16, AB_INT32, AB_INT64, AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32});
}
inline int64_t any_width(Random& random) { return random.one_of<int64_t>({0, 1, 3, 8, 17, 64}); }

// Sizes shared by several operations. Mostly small; sometimes large enough for several threads.
struct Sizes {
  int64_t T, E, K, R, D, F, P, B;

  explicit Sizes(Random& random) {
    const bool large = random.chance(0.02);
    T = kEmulated ? random.one_of<int64_t>({0, 1, 2, 5, 9, 33, 70})
        : large   ? random.between(300, 1000)
                  : random.one_of<int64_t>({0, 1, 2, 5, 33, 140, 260});
    E = large ? random.between(1, 8) : random.one_of<int64_t>({1, 2, 3, 4, 8, 16, 33, 65, kEmulated ? 65 : 130});
    K = random.between(1, T <= 40 && random.chance(0.2) ? E : std::min<int64_t>(E, 4));
    R = random.chance(0.5) ? T * K : random.one_of<int64_t>({0, 1, 7, 16, 40, 100, kEmulated ? 130 : 300});
    D = large ? 256 : any_width(random);
    F = large ? random.between(32, 64) : any_width(random);
    P = random.between(1, 2);
    B = T % 5 == 0 && T > 0 && random.chance(0.5) ? 5 : 1;
  }
  // Sizes for quantised operands. Few experts, because each matrix is large.
  static Sizes quantizable(Random& random) {
    Sizes s(random);
    s.T = std::min<int64_t>(s.T, 140);
    s.E = std::min<int64_t>(s.E, 3);
    s.K = std::min(s.K, s.E);
    s.R = random.chance(0.5) ? s.T * s.K : std::min<int64_t>(s.R, 140);
    s.D = random.one_of<int64_t>({0, 128, 128, 256});
    s.F = random.one_of<int64_t>({0, 128, 128, 256});
    return s;
  }

  // Sizes for the router. E, K and T > 512 select its kernels.
  static Sizes routed(Random& random) {
    Sizes s(random);
    if (!kEmulated) return s;
    if (random.chance(0.1)) s.T = random.one_of<int64_t>({513, 600});
    if (random.chance(0.2)) s.E = random.one_of<int64_t>({128, 200, 256, 390, 512});
    if (random.chance(0.02)) {  // more experts than fit in registers
      s.T = std::min<int64_t>(s.T, 9);
      s.E = random.one_of<int64_t>({1025, 1100});
    }
    if (s.T <= 40 && random.chance(0.1)) s.K = random.between(1, std::min<int64_t>(s.E, 70));
    s.B = s.T % 5 == 0 && s.T > 0 && random.chance(0.5) ? 5 : 1;
    return s;
  }

  Shape statistics(Random& random) const { return B == 1 && random.chance(0.5) ? Shape{E} : Shape{B, E}; }
};

// Adds gather and scatter indices that often refer to each other.
inline void add_maps(const Sizes& s, const ab_tensor** row_of_slot, const ab_tensor** slot_of_row, Call* call) {
  call->input("row_of_slot", row_of_slot, AB_INT32, {s.T, s.K}, s.R);
  if (slot_of_row != nullptr) call->input("slot_of_row", slot_of_row, AB_INT32, {s.R}, s.T * s.K);
}

// Each makes a valid call of the operation in its name.
void make_router_forward(const Operation& operation, Random& random, Call* call);
void make_router_backward(const Operation& operation, Random& random, Call* call);
void make_load_balance_loss(const Operation& operation, Random& random, Call* call);
void make_moe_aux_loss(const Operation& operation, Random& random, Call* call);
void make_score_sum(const Operation& operation, Random& random, Call* call);
void make_plan(const Operation& operation, Random& random, Call* call);
void make_dispatch(const Operation& operation, Random& random, Call* call);
void make_combine(const Operation& operation, Random& random, Call* call);
void make_combine_backward(const Operation& operation, Random& random, Call* call);
void make_sort_chunks(const Operation& operation, Random& random, Call* call);
void make_expand_row_id_map(const Operation& operation, Random& random, Call* call);
void make_quantize_rows(const Operation& operation, Random& random, Call* call);
void make_quantize_weights(const Operation& operation, Random& random, Call* call);
void make_grouped_matmul(const Operation& operation, Random& random, Call* call);
void make_grouped_matmul_dw(const Operation& operation, Random& random, Call* call);
void make_grouped_matmul_combine(const Operation& operation, Random& random, Call* call);
void make_expert_ffn_forward(const Operation& operation, Random& random, Call* call);
void make_expert_ffn_backward(const Operation& operation, Random& random, Call* call);

}  // namespace anabranch::fuzz
