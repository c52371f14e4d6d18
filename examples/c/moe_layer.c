/* A Mixture-of-Experts layer without Python: route, plan, experts, combine, on the CPU.
 *
 *   cc -std=c11 moe_layer.c -I<include> -L<lib> -lanabranch -lm -o moe_layer && ./moe_layer
 */
#include <anabranch/balance.h>
#include <anabranch/dispatch.h>
#include <anabranch/experts.h>
#include <anabranch/router.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 64, E = 8, K = 2, D = 32, F = 48, R = T * K };

/* Every call returns its status by value: a code and a message that names the argument. */
static void check(ab_status status) {
  if (status.code == AB_OK) return;
  fprintf(stderr, "anabranch: %s\n", status.message);
  exit(1);
}

/* The caller owns scratch memory: query its size, allocate it, and reuse it for later calls if possible. */
static ab_exec with_workspace(size_t bytes) {
  ab_exec exec = {.size = sizeof exec};
  exec.workspace_size = (bytes + 63) / 64 * 64;
  exec.workspace = bytes > 0 ? aligned_alloc(64, exec.workspace_size) : NULL;
  if (bytes > 0 && exec.workspace == NULL) {
    fprintf(stderr, "no memory for a workspace of %zu bytes\n", bytes);
    exit(1);
  }
  return exec;
}

#define RUN(operation, args)                             \
  do {                                                   \
    size_t bytes = 0;                                    \
    check(operation##_workspace(&(args), NULL, &bytes)); \
    ab_exec exec = with_workspace(bytes);                \
    check(operation(&(args), &exec));                    \
    free(exec.workspace);                                \
  } while (0)

static void fill(float* values, size_t count, float scale, unsigned seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
  }
}

static float x[T][D], gate[D][E], w_in[E][D][2][F], w_out[E][F][D], logits[T][E];
static float weights[T][K], score_sum[E], h[R][2][F], y[R][D], out[T][D];
static int32_t experts[T][K], tokens_per_expert[E], group_sizes[E], row_of_slot[T][K], slot_of_row[R], dropped;

int main(void) {
  fill(&x[0][0], T * D, 1.0f, 1);
  fill(&gate[0][0], D * E, 0.5f, 2);
  fill(&w_in[0][0][0][0], E * D * 2 * F, 0.3f, 3);
  fill(&w_out[0][0][0], E * F * D, 0.3f, 4);
  for (int t = 0; t < T; ++t) {
    for (int e = 0; e < E; ++e) {
      logits[t][e] = 0;
      for (int d = 0; d < D; ++d) logits[t][e] += x[t][d] * gate[d][e];
    }
  }

  /* Views of the arrays. */
  const ab_tensor v_x = {x, AB_FLOAT32, 2, {T, D}, NULL};
  const ab_tensor v_logits = {logits, AB_FLOAT32, 2, {T, E}, NULL};
  const ab_tensor v_weights = {weights, AB_FLOAT32, 2, {T, K}, NULL};
  const ab_tensor v_experts = {experts, AB_INT32, 2, {T, K}, NULL};
  const ab_tensor v_counts = {tokens_per_expert, AB_INT32, 1, {E}, NULL};
  const ab_tensor v_score_sum = {score_sum, AB_FLOAT32, 1, {E}, NULL};
  const ab_tensor v_sizes = {group_sizes, AB_INT32, 1, {E}, NULL};
  const ab_tensor v_row_of_slot = {row_of_slot, AB_INT32, 2, {T, K}, NULL};
  const ab_tensor v_slot_of_row = {slot_of_row, AB_INT32, 1, {R}, NULL};
  const ab_tensor v_dropped = {&dropped, AB_INT32, 0, {0}, NULL};
  const ab_tensor v_w_in = {w_in, AB_FLOAT32, 4, {E, D, 2, F}, NULL};
  const ab_tensor v_w_out = {w_out, AB_FLOAT32, 3, {E, F, D}, NULL};
  const ab_tensor v_h = {h, AB_FLOAT32, 3, {R, 2, F}, NULL};
  const ab_tensor v_y = {y, AB_FLOAT32, 2, {R, D}, NULL};
  const ab_tensor v_out = {out, AB_FLOAT32, 2, {T, D}, NULL};

  /* Route: the K best experts of every token and their weights. */
  const ab_router_forward_args route = {
      .size = sizeof route,
      .topk = K,
      .score_function = AB_SOFTMAX,
      .normalize = 1,
      .scaling_factor = 1.0f,
      .logits = &v_logits,
      .weights = &v_weights,
      .experts = &v_experts,
      .tokens_per_expert = &v_counts,
      .score_sum = &v_score_sum,
  };
  RUN(ab_router_forward, route);

  /* Plan: the gather and scatter indices between assignments (t, k) and rows of the dispatched buffer. */
  const ab_plan_args plan = {
      .size = sizeof plan,
      .num_experts = E,
      .experts = &v_experts,
      .group_sizes = &v_sizes,
      .row_of_slot = &v_row_of_slot,
      .slot_of_row = &v_slot_of_row,
      .dropped = &v_dropped,
  };
  RUN(ab_plan, plan);

  /* Experts: gathers the tokens and computes y = (silu(x W_gate) * (x W_up)) W_out. */
  const ab_expert_ffn_forward_args ffn = {
      .size = sizeof ffn,
      .activation = AB_SILU,
      .topk = K,
      .x = &v_x,
      .slot_of_row = &v_slot_of_row,
      .group_sizes = &v_sizes,
      .w_in = &v_w_in,
      .w_out = &v_w_out,
      .y = &v_y,
      .h = &v_h,
  };
  RUN(ab_expert_ffn_forward, ffn);

  /* Combine: out[t] = sum over k of weights[t, k] * y[row_of_slot[t, k]]. */
  const ab_combine_args combine = {
      .size = sizeof combine,
      .rows = &v_y,
      .row_of_slot = &v_row_of_slot,
      .weights = &v_weights,
      .out = &v_out,
  };
  RUN(ab_combine, combine);

  /* The load-balance loss of this batch. */
  static const int32_t num_tokens = T;
  float loss = 0;
  const ab_tensor v_num_tokens = {(void*)&num_tokens, AB_INT32, 0, {0}, NULL};
  const ab_tensor v_loss = {&loss, AB_FLOAT32, 0, {0}, NULL};
  const ab_load_balance_loss_args balance = {
      .size = sizeof balance,
      .topk = K,
      .coeff = 1.0f,
      .score_sum = &v_score_sum,
      .tokens_per_expert = &v_counts,
      .num_tokens = &v_num_tokens,
      .loss = &v_loss,
  };
  check(ab_load_balance_loss(&balance, NULL));

  /* Compute the layer directly from its formula. */
  double worst = 0;
  for (int t = 0; t < T; ++t) {
    for (int d = 0; d < D; ++d) {
      double want = 0;
      for (int k = 0; k < K; ++k) {
        const int e = experts[t][k];
        for (int f = 0; f < F; ++f) {
          double g = 0, u = 0;
          for (int i = 0; i < D; ++i) {
            g += (double)x[t][i] * w_in[e][i][0][f];
            u += (double)x[t][i] * w_in[e][i][1][f];
          }
          want += weights[t][k] * (g / (1 + exp(-g)) * u * w_out[e][f][d]);
        }
      }
      worst = fmax(worst, fabs(want - out[t][d]));
    }
  }

  printf("anabranch %s: %d tokens, %d experts, %d per token\n", ab_version(), T, E, K);
  printf("token 0: experts %d %d, weights %.4f %.4f\n", experts[0][0], experts[0][1], weights[0][0], weights[0][1]);
  printf("tokens per expert:");
  for (int e = 0; e < E; ++e) printf(" %d", tokens_per_expert[e]);
  printf("\ndropped: %d, load-balance loss: %.4f\n", dropped, loss);
  printf("agrees with the formula: %s\n", worst < 1e-4 ? "yes" : "no");
  return worst < 1e-4 ? 0 : 1;
}
