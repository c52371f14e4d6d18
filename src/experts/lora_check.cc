#include "experts/lora_check.h"

#include <cmath>

namespace anabranch {
namespace {

// The factors of an adapter with the names of its arguments.
struct Pair {
  const char* a_name;
  const char* b_name;
  const char* scale_name;
  const char* rank_name;
  const ab_tensor* a;
  const ab_tensor* b;
  float scale;
};

Dtypes dtypes_of_factors(int32_t dtype) { return dtype_bit(static_cast<ab_dtype>(dtype)) | kFloat32; }

ab_status check_scale(const char* name, float scale, bool used) {
  if (used ? std::isfinite(scale) : scale == 0.0f) return ok();
  return AB_INVALID("%s: got %g, expected %s", name, static_cast<double>(scale),
                    used ? "a finite number" : "0 without an adapter that it scales");
}

ab_status check_factor(const char* name, const ab_tensor* tensor, int32_t dtype, int64_t E,
                       std::initializer_list<Axis> shape) {
  AB_RETURN_IF_ERROR(check_strided(name, tensor, dtypes_of_factors(dtype), shape));
  return check_shared(name, tensor, E);
}

// Checks A [E or 1, C, rank] and B [E or 1, rank, N], or with P > 0 [E or 1, rank, P, N]. Sets the rank, 0 without
// factors.
ab_status check_pair(const Pair& pair, int32_t dtype, int64_t E, Axis C, int64_t P, Axis N, int64_t* rank) {
  *rank = 0;
  if (pair.a == nullptr && pair.b == nullptr) return check_scale(pair.scale_name, pair.scale, false);
  AB_RETURN_IF_ERROR(check_factor(pair.a_name, pair.a, dtype, E, {{"E or 1"}, C, {pair.rank_name}}));
  *rank = pair.a->shape[2];
  if (*rank < 1) return AB_INVALID("%s: got rank 0, expected at least 1", pair.a_name);
  const Axis r{pair.rank_name, *rank};
  AB_RETURN_IF_ERROR(P > 0 ? check_factor(pair.b_name, pair.b, dtype, E, {{"E or 1"}, r, {"P", P}, N})
                           : check_factor(pair.b_name, pair.b, dtype, E, {{"E or 1"}, r, N}));
  return check_scale(pair.scale_name, pair.scale, true);
}

ab_status check_rows(const char* name, const ab_tensor* tensor, int32_t dtype, int64_t R, Axis rank) {
  if (tensor != nullptr && rank.size == 0)
    return AB_INVALID("%s: got a tensor, expected NULL without an adapter", name);
  return check_optional(name, tensor, dtype_bit(static_cast<ab_dtype>(dtype)), {{"R", R}, rank});
}

// A copy has the shape of its factor. Its experts are outermost.
ab_status check_copy(const char* name, const ab_tensor* copy, const ab_tensor* factor, int32_t dtype,
                     std::initializer_list<const char*> axes) {
  constexpr Order kThree[] = {{{0, 1, 2}}, {{0, 2, 1}}};
  constexpr Order kFour[] = {{{0, 1, 2, 3}}, {{0, 2, 3, 1}}, {{0, 1, 3, 2}}, {{0, 3, 2, 1}}};
  if (copy == nullptr) return ok();
  if (factor == nullptr) return AB_INVALID("%s: got a tensor, expected NULL without an adapter", name);
  const Dtypes dtypes = dtype_bit(static_cast<ab_dtype>(dtype));
  const auto axis = [&](int i) { return Axis{axes.begin()[i], factor->shape[i]}; };
  size_t order = 0;
  return factor->rank == 4 ? check_ordered(name, copy, dtypes, {axis(0), axis(1), axis(2), axis(3)}, kFour, &order)
                           : check_ordered(name, copy, dtypes, {axis(0), axis(1), axis(2)}, kThree, &order);
}

// A gradient has the shape of its factor, with these names of the axes, and is row-major.
ab_status check_gradient(const char* name, const ab_tensor* gradient, const ab_tensor* factor, int32_t accumulate,
                         std::initializer_list<const char*> axes) {
  if (gradient == nullptr) return ok();
  if (factor == nullptr) return AB_INVALID("%s: got a tensor, expected NULL without an adapter", name);
  const Dtypes dtypes = accumulate != 0 ? kFloat32 : dtypes_of_factors(factor->dtype);
  const auto axis = [&](int i) { return Axis{axes.begin()[i], factor->shape[i]}; };
  return factor->rank == 4 ? check_tensor(name, gradient, dtypes, {axis(0), axis(1), axis(2), axis(3)})
                           : check_tensor(name, gradient, dtypes, {axis(0), axis(1), axis(2)});
}

template <class Args>
ab_status check_product_lora(const Args* args, int32_t dtype, GroupedSizes* s) {
  if (args->lora_a == nullptr && args->lora_u != nullptr) {  // u is an input
    AB_RETURN_IF_ERROR(check_scale("lora_scale", args->lora_scale, false));
    AB_RETURN_IF_ERROR(
        check_tensor("lora_u", args->lora_u, dtype_bit(static_cast<ab_dtype>(dtype)), {{"R", s->R}, {"r"}}));
    s->rank = args->lora_u->shape[1];
    if (s->rank < 1) return AB_INVALID("lora_u: got rank 0, expected at least 1");
    return check_factor("lora_b", args->lora_b, dtype, s->E, {{"E or 1"}, {"r", s->rank}, {"N", s->N}});
  }
  AB_RETURN_IF_ERROR(check_pair({"lora_a", "lora_b", "lora_scale", "r", args->lora_a, args->lora_b, args->lora_scale},
                                dtype, s->E, {"D", s->D}, 0, {"N", s->N}, &s->rank));
  if (s->rank > 0 && args->x->dtype == AB_FLOAT8_E4M3) {
    return AB_INVALID("lora_a: got a tensor, expected NULL and lora_u if x is quantised");
  }
  return check_rows("lora_u", args->lora_u, dtype, s->R, {"r", s->rank});
}

template <class Args>
ab_status check_network_lora(const Args* args, FfnSizes* s) {
  AB_RETURN_IF_ERROR(check_pair(
      {"lora_a_in", "lora_b_in", "lora_scale_in", "r", args->lora_a_in, args->lora_b_in, args->lora_scale_in}, s->dtype,
      s->E, {"D", s->D}, s->P, {"F", s->F}, &s->rank_in));
  return check_pair(
      {"lora_a_out", "lora_b_out", "lora_scale_out", "q", args->lora_a_out, args->lora_b_out, args->lora_scale_out},
      s->dtype, s->E, {"F", s->F}, 0, {"D", s->D}, &s->rank_out);
}

}  // namespace

ab_status check_shared(const char* name, const ab_tensor* tensor, int64_t E) {
  const int64_t count = tensor->shape[0];
  if (count == E || count == 1) return ok();
  return AB_INVALID("%s: got %lld matrices, expected E=%lld, or 1 that all experts share", name,
                    static_cast<long long>(count), static_cast<long long>(E));
}

ab_status check_lora(const ab_grouped_matmul_args* args, int32_t dtype, GroupedSizes* s) {
  return check_product_lora(args, dtype, s);
}
ab_status check_lora(const ab_grouped_matmul_combine_args* args, int32_t dtype, GroupedSizes* s) {
  return check_product_lora(args, dtype, s);
}

ab_status check_lora(const ab_expert_ffn_forward_args* args, FfnSizes* s) {
  AB_RETURN_IF_ERROR(check_network_lora(args, s));
  if (s->rank_in > 0 && args->x == nullptr) {
    return AB_INVALID("x: got NULL, expected rows that are not quantised, for the adapter of W_in");
  }
  AB_RETURN_IF_ERROR(check_rows("lora_u", args->lora_u, s->dtype, s->R, {"r", s->rank_in}));
  AB_RETURN_IF_ERROR(check_rows("lora_z", args->lora_z, s->dtype, s->R, {"q", s->rank_out}));
  if (s->rank_out > 0 && args->y == nullptr && args->lora_z == nullptr) {
    return AB_INVALID("lora_z: got NULL, expected a tensor, since the adapter of W_out is given and y is not");
  }
  AB_RETURN_IF_ERROR(check_copy("lora_a_in_copy", args->lora_a_in_copy, args->lora_a_in, s->dtype, {"E", "D", "r"}));
  AB_RETURN_IF_ERROR(
      check_copy("lora_b_in_copy", args->lora_b_in_copy, args->lora_b_in, s->dtype, {"E", "r", "P", "F"}));
  AB_RETURN_IF_ERROR(check_copy("lora_a_out_copy", args->lora_a_out_copy, args->lora_a_out, s->dtype, {"E", "F", "q"}));
  return check_copy("lora_b_out_copy", args->lora_b_out_copy, args->lora_b_out, s->dtype, {"E", "q", "D"});
}

ab_status check_lora(const ab_expert_ffn_backward_args* args, FfnSizes* s) {
  AB_RETURN_IF_ERROR(check_network_lora(args, s));
  AB_RETURN_IF_ERROR(check_rows("lora_u", args->lora_u, s->dtype, s->R, {"r", s->rank_in}));
  AB_RETURN_IF_ERROR(check_rows("lora_v_in", args->lora_v_in, s->dtype, s->R, {"r", s->rank_in}));
  AB_RETURN_IF_ERROR(check_rows("lora_v_out", args->lora_v_out, s->dtype, s->R, {"q", s->rank_out}));
  const int32_t accumulate = args->accumulate;
  AB_RETURN_IF_ERROR(check_gradient("d_lora_a_in", args->d_lora_a_in, args->lora_a_in, accumulate, {"E", "D", "r"}));
  AB_RETURN_IF_ERROR(
      check_gradient("d_lora_b_in", args->d_lora_b_in, args->lora_b_in, accumulate, {"E", "r", "P", "F"}));
  AB_RETURN_IF_ERROR(check_gradient("d_lora_a_out", args->d_lora_a_out, args->lora_a_out, accumulate, {"E", "F", "q"}));
  return check_gradient("d_lora_b_out", args->d_lora_b_out, args->lora_b_out, accumulate, {"E", "q", "D"});
}

}  // namespace anabranch
