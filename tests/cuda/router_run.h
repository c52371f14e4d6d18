// Runs the router on the GPU. Builds its arguments from host tensors or from their device copies.
#pragma once

#include "anabranch/cuda.h"
#include "device.h"
#include "router_case.h"

namespace anabranch::testing {
namespace {

ab_router_forward_args forward_args(const Case& c, const Inputs& in, const Outputs& out) {
  ab_router_forward_args args{};
  args.size = sizeof(args);
  args.topk = c.K;
  args.score_function = c.score_function;
  args.normalize = c.normalize;
  args.num_groups = c.num_groups;
  args.group_topk = c.group_topk;
  args.group_score_topk = c.group_score_topk;
  args.scaling_factor = 1.5f;
  args.logits = in.logits.view();
  args.expert_bias = c.bias ? in.bias.view() : nullptr;
  args.token_mask = c.mask ? in.mask.view() : nullptr;
  args.forced_experts = c.forced ? in.forced.view() : nullptr;
  args.experts = out.experts.view();
  args.tokens_per_expert = out.counts.view();
  args.lse = out.lse.view();
  if (c.form == Form::aux) {
    args.aux_scores = out.aux.view();
    args.weights = out.weights.view();
  } else {
    args.score_sum = out.score_sum.view();
    args.weights = c.form == Form::compact ? out.weights.view() : nullptr;
    args.probs = c.form == Form::compact ? nullptr : out.probs.view();
    args.routing_map = out.map(c.form);
  }
  if (c.qb_bins > 0) {
    args.qb_bin_bounds = in.bin_bounds.view();
    args.qb_histogram = out.histogram.view();
  }
  return args;
}

// add(tensor) returns the device copy of a host tensor.
template <class Add>
ab_router_forward_args on_device(ab_router_forward_args args, const Add& add) {
  for (const ab_tensor** tensor :
       {&args.logits, &args.expert_bias, &args.token_mask, &args.forced_experts, &args.weights, &args.experts,
        &args.tokens_per_expert, &args.score_sum, &args.lse, &args.probs, &args.routing_map, &args.aux_scores,
        &args.qb_bin_bounds, &args.qb_histogram}) {
    *tensor = add(*tensor);
  }
  return args;
}

template <class Add>
ab_router_backward_args on_device(ab_router_backward_args args, const Add& add) {
  for (const ab_tensor** tensor : {&args.logits, &args.experts, &args.token_mask, &args.lse, &args.d_weights,
                                   &args.d_probs, &args.d_score_sum, &args.d_aux_scores, &args.d_lse, &args.d_logits}) {
    *tensor = add(*tensor);
  }
  return args;
}

auto add_to(Mirrors* mirrors, bool unaligned = false) {
  return [=](const ab_tensor* host) {
    return mirrors->add(host, unaligned && host != nullptr ? element_bytes_of(*host) : 0);
  };
}

void run(const ab_router_forward_args& args) {
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_router_forward_workspace(&args, nullptr, &bytes));
  DeviceWorkspace workspace(bytes);
  EXPECT_OK(ab_cuda_router_forward(&args, &workspace.exec()));
  workspace.check();
}

void run_on_device(const Case& c, const Inputs& in, const Outputs& out) {
  Mirrors mirrors;
  run(on_device(forward_args(c, in, out), add_to(&mirrors, c.unaligned)));
  mirrors.fetch();
}

ab_router_backward_args backward_args(const Case& c, const Inputs& in, const Outputs& out) {
  ab_router_backward_args args{};
  args.size = sizeof(args);
  args.topk = c.K;
  args.score_function = c.score_function;
  args.normalize = c.normalize;
  args.scaling_factor = 1.5f;
  args.logits = in.logits.view();
  args.experts = out.experts.view();
  args.token_mask = c.mask ? in.mask.view() : nullptr;
  return args;
}

}  // namespace
}  // namespace anabranch::testing
