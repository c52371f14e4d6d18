// Packed weights that are decoded for several ranges of experts, on the GPU: the bits of the unpacked weights.
#include "ffn_case.h"
#include "isolated_workspace.h"
#include "packed_network.h"

namespace anabranch::testing {
namespace {

using PackedRangesCuda = ExpertsCudaTest;

// A device copy of packed weights, and their values in another dtype.
class DeviceWeights {
 public:
  DeviceWeights(const PackedTensor& packed, int32_t dtype, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& scales_shape, const std::vector<int>& order)
      : values_(packed.view(shape, {order.begin(), order.end()}, strides_[0])),
        scales_(packed.scales_view(scales_shape, {order.begin(), order.end()}, strides_[1])),
        packed_(mirrors_.add(&values_)),
        packed_scales_(mirrors_.add(&scales_)) {
    ab_tensor plain = values_;
    plain.dtype = dtype;
    EXPECT_CUDA(cudaMalloc(&memory_, static_cast<size_t>(bytes_of(plain))));
    plain.data = memory_;
    plain_ = std::make_unique<Ordered>(&plain, order);
    // ab_unpack takes the same memory as matrices [M, N, C].
    int64_t strides[2][AB_MAX_RANK] = {};
    const bool fp4 = packed.is_fp4();
    ab_tensor from = packed.view({packed.M, packed.N, packed.C}, {0, 1, 2}, strides[0]);
    ab_tensor from_scales = packed.scales_view(
        {packed.M, fp4 ? packed.N : packed.N / kBlock, packed.C / (fp4 ? 32 : kBlock)}, {0, 1, 2}, strides[1]);
    ab_tensor to = from;
    from.data = packed_->data;
    from_scales.data = packed_scales_->data;
    to.data = memory_;
    to.dtype = dtype;
    const ab_unpack_args args{sizeof(args), &from, &from_scales, &to};
    EXPECT_OK(ab_cuda_unpack(&args, nullptr));
  }
  ~DeviceWeights() { cudaFree(memory_); }
  DeviceWeights(const DeviceWeights&) = delete;
  DeviceWeights& operator=(const DeviceWeights&) = delete;

  const ab_tensor* packed() const { return packed_; }
  const ab_tensor* scales() const { return packed_scales_; }
  const ab_tensor* plain() const { return plain_->view(); }

 private:
  int64_t strides_[2][AB_MAX_RANK] = {};
  ab_tensor values_, scales_;
  Mirrors mirrors_;
  const ab_tensor* packed_;
  const ab_tensor* packed_scales_;
  void* memory_ = nullptr;
  std::unique_ptr<Ordered> plain_;
};

// W_in and W_out each exceed the scratch memory of a GPU: in float16 they are decoded for several ranges of experts, in
// bfloat16 Hopper's kernels decode them. Their values stay on the device; the CPU would take a minute to write them.
// The last tiles are wholly or partly outside the matrices. Memory before and after the workspace is not mapped: the
// address of expert 0's matrix is there if the range begins later.
TEST_F(PackedRangesCuda, LargeWeights) {
  SKIP_WITHOUT_GIB(8);
  const int64_t E = 33, D = 4224, F = 2176;
  const PackedTensor w_in(E, 2 * F, D, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
  const PackedTensor w_out(E, D, F, AB_FLOAT8_E4M3, AB_FLOAT32, 2);
  std::vector<int32_t> sizes(static_cast<size_t>(E), 45);
  sizes[3] = sizes[31] = 0;
  sizes[16] = 1;
  for (const int32_t dtype : {AB_FLOAT16, AB_BFLOAT16}) {
    FfnCase c{sizes, 1400, D, F, 2};
    c.T = 480;
    c.K = 3;
    c.dtype = dtype;
    c.layout = kPfd;
    c.has_weights = false;
    const DeviceWeights in(w_in, dtype, {E, D, 2, F}, {E, D / 32, 2, F}, kLayouts[kPfd].in);
    const DeviceWeights out(w_out, dtype, {E, F, D}, {E, F / kBlock, D / kBlock}, kLayouts[kPfd].out);
    const auto run = [&](const Network& net, bool packed) {
      const auto with_weights = [&](auto args) {
        args.w_in = packed ? in.packed() : in.plain();
        args.w_out = packed ? out.packed() : out.plain();
        args.w_in_block_scales = packed ? in.scales() : nullptr;
        args.w_out_block_scales = packed ? out.scales() : nullptr;
        return args;
      };
      using A = ab_expert_ffn_forward_args;
      run_on_copies<IsolatedWorkspace>(ab_cuda_expert_ffn_forward_workspace, ab_cuda_expert_ffn_forward,
                                       with_weights(net.forward_args()), &A::x, &A::slot_of_row, &A::group_sizes,
                                       &A::b_in, &A::b_out, &A::weights, &A::y, &A::h);
      using B = ab_expert_ffn_backward_args;
      B backward = with_weights(net.backward_args());
      backward.d_w_in = backward.d_w_out = nullptr;
      run_on_copies<IsolatedWorkspace>(ab_cuda_expert_ffn_backward_workspace, ab_cuda_expert_ffn_backward, backward,
                                       &B::x, &B::slot_of_row, &B::group_sizes, &B::b_out, &B::weights, &B::h,
                                       &B::d_out, &B::dh, &B::dx_rows, &B::d_b_in, &B::d_b_out, &B::d_weights);
    };
    const Network want(c), got(c);
    run(want, false);
    run(got, true);
    SCOPED_TRACE(::testing::Message() << c);
    got.expect_same_bits(want);
    for (int64_t r = 0; r < c.R; ++r) {
      if (want.slot_of(r) < 0) continue;
      EXPECT_NE(want.y.get(r * D), 0.0f) << r;
      EXPECT_TRUE(std::isfinite(want.dx_rows.get(r * D))) << r;
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
