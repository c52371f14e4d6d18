// An expert MLP with adapters whose weights are packed, for tests on the GPU against the CPU.
#pragma once

#include <memory>
#include <vector>

#include "lora_case.h"
#include "packed_operands.h"

namespace anabranch::testing {

constexpr int kPfd = 1;  // indices into kLayouts
constexpr int kFpd = 3;

struct Kinds {
  int32_t w_in = AB_FLOAT4_E2M1X2;  // dtype; 0: not packed
  int32_t w_out = AB_FLOAT4_E2M1X2;
  int32_t scales = AB_FLOAT8_E8M0;
};

// A network and its packed weights. The plain weights have the unpacked values.
struct PackedNetwork {
  LoraNetwork network;
  std::unique_ptr<PackedTensor> packed[2];
  ab_tensor views[4];  // w_in and its scales, w_out and its scales
  int64_t strides[4][AB_MAX_RANK] = {};

  PackedNetwork(const LoraCase& l, const Kinds& kinds) : network(l) {
    const FfnCase& c = l.c;
    const std::vector<int>& in = kLayouts[static_cast<size_t>(c.layout)].in;
    if (kinds.w_in != 0) {
      const bool fp4 = kinds.w_in == AB_FLOAT4_E2M1X2;
      packed[0] = std::make_unique<PackedTensor>(c.E(), c.P * c.F, c.D, kinds.w_in, kinds.scales, 1);
      views[0] = packed[0]->view({c.E(), c.D, c.P, c.F}, {in.begin(), in.end()}, strides[0]);
      views[1] = packed[0]->scales_view({c.E(), c.D / (fp4 ? 32 : kBlock), c.P, c.F / (fp4 ? 1 : kBlock)},
                                        {in.begin(), in.end()}, strides[1]);
      fill(*packed[0], &network.net.w_in);
    }
    if (kinds.w_out != 0) {
      const bool fp4 = kinds.w_out == AB_FLOAT4_E2M1X2;
      packed[1] = std::make_unique<PackedTensor>(c.E(), c.D, c.F, kinds.w_out, kinds.scales, 2);
      views[2] = packed[1]->view({c.E(), c.F, c.D}, {0, 2, 1}, strides[2]);
      views[3] =
          packed[1]->scales_view({c.E(), c.F / (fp4 ? 32 : kBlock), c.D / (fp4 ? 1 : kBlock)}, {0, 2, 1}, strides[3]);
      fill(*packed[1], &network.net.w_out);
    }
  }

  static void fill(const PackedTensor& from, FloatTensor* to) {
    for (int64_t i = 0; i < from.size(); ++i) to->set(i, from.value(i));
  }

  template <class Args>
  Args with_packed(Args args) const {
    if (packed[0] != nullptr) {
      args.w_in = &views[0];
      args.w_in_block_scales = &views[1];
    }
    if (packed[1] != nullptr) {
      args.w_out = &views[2];
      args.w_out_block_scales = &views[3];
    }
    return args;
  }

  void forward_on_gpu() const { Network::forward_on_gpu(with_packed(network.forward_args())); }
  void on_gpu() const {
    forward_on_gpu();
    Network::backward_on_gpu(with_packed(network.backward_args()));
  }
};

}  // namespace anabranch::testing
