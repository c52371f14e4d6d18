// grouped_matmul_combine on the GPU against a grouped GEMM followed by combine, bit for bit.
#include "core/cuda/device.h"
#include "dispatch_case.h"
#include "experts/column_chunks.h"
#include "experts/cuda/grouped_matmul_combine.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "ffn_case.h"

namespace anabranch::testing {
namespace {

using Args = ab_grouped_matmul_combine_args;

ab_tensor flat_view(const ab_tensor* view, int32_t rank) {
  ab_tensor flat = *view;
  flat.shape[rank - 1] *= flat.shape[rank];
  flat.rank = rank;
  return flat;
}

// The rows of a network, and the sums by token of its down and dgrad GEMMs.
struct Summed {
  const Network& net;
  Tensor<int32_t> row_of_slot;
  FloatTensor a, addend, want, got;
  ab_tensor dh, w_in;
  bool adds;

  // addend_dtype 0: no addend.
  Summed(const Network& network, int32_t addend_dtype, int32_t out_dtype)
      : net(network),
        row_of_slot({net.c.T, net.c.K}),
        a({net.c.R, net.c.F}, net.c.dtype),
        addend({net.c.T, net.c.D}, addend_dtype == 0 ? AB_FLOAT32 : addend_dtype),
        want({net.c.T, net.c.D}, out_dtype),
        got({net.c.T, net.c.D}, out_dtype),
        dh(flat_view(net.dh.view(), 2)),
        w_in(flat_view(net.w_in.view(), 3)),
        adds(addend_dtype != 0) {
    addend.fill_normal(7);
    for (int64_t r = 0; r < net.c.R; ++r) {  // rows past the groups too
      if (net.slots[r] >= 0 && net.slots[r] < net.c.T * net.c.K) row_of_slot[net.slots[r]] = static_cast<int32_t>(r);
    }
  }

  Args common() const {
    Args args{};
    args.size = sizeof(args);
    args.group_sizes = net.sizes.view();
    args.slot_of_row = net.slots.view();
    args.row_of_slot = row_of_slot.view();
    args.addend = adds ? addend.view() : nullptr;
    args.out = got.view();
    return args;
  }

  // a W_out + b_out. Requires `a` and y from run_network().
  Args down() const {
    Args args = common();
    args.x = a.view();
    args.w = net.w_out.view();
    args.bias = net.c.biases ? net.b_out.view() : nullptr;
    args.weights = net.c.weighting == Weighting::none ? nullptr : net.weights.view();
    args.weight_early = net.c.weighting == Weighting::early ? 1 : 0;
    return args;
  }

  // dh W_in^T. Requires dh and dx_rows from run_network().
  Args dgrad() const {
    Args args = common();
    args.transpose_w = 1;
    args.backward = 1;
    args.x = &dh;
    args.w = &w_in;
    return args;
  }

  void run_network() const {
    ab_expert_ffn_forward_args forward = net.forward_args();
    forward.a = a.view();
    if (net.c.weighting == Weighting::late) forward.weights = nullptr;  // the sum applies the weights
    Network::forward_on_gpu(forward);
    Network::backward_on_gpu(net.backward_args());
  }

  // Runs combine on the rows that the network's own GEMM computed.
  void sum_rows(const FloatTensor& rows, const Args& args) const {
    Mirrors mirrors;
    ab_combine_args sum{sizeof(sum), rows.view(), args.row_of_slot, args.weight_early != 0 ? nullptr : args.weights,
                        want.view(), args.addend};
    using A = ab_combine_args;
    for (const auto member : {&A::rows, &A::row_of_slot, &A::weights, &A::out, &A::addend}) {
      sum.*member = mirrors.add(sum.*member);
    }
    EXPECT_OK(ab_cuda_combine(&sum, nullptr));
    mirrors.fetch();
  }

  static Args on_device(Args args, Mirrors* mirrors) {
    for (const auto member : {&Args::x, &Args::w, &Args::group_sizes, &Args::bias, &Args::slot_of_row,
                              &Args::row_of_slot, &Args::weights, &Args::addend, &Args::out}) {
      args.*member = mirrors->add(args.*member);
    }
    return args;
  }

  void fill_with_nan() { std::memset(got.view()->data, 0xff, static_cast<size_t>(bytes_of(*got.view()))); }

  // chunk: columns per chunk; 0: the operation chooses.
  void run(const Args& args, int64_t chunk) {
    fill_with_nan();
    Mirrors mirrors;
    const Args copies = on_device(args, &mirrors);
    CombinedSizes sizes;
    EXPECT_OK(anabranch::check(&copies, &sizes));
    size_t bytes = static_cast<size_t>(sizes.R * chunk * element_bytes_of(*args.x));
    if (chunk == 0) EXPECT_OK(ab_cuda_grouped_matmul_combine_workspace(&copies, nullptr, &bytes));
    DeviceWorkspace workspace(bytes);
    if (chunk == 0) {
      EXPECT_OK(ab_cuda_grouped_matmul_combine(&copies, &workspace.exec()));
    } else {
      cuda::Device device;
      EXPECT_OK(cuda::find_device("test", &device));
      EXPECT_OK(cuda::multiply_and_combine(copies, sizes, chunk, workspace.exec().workspace, device, nullptr));
    }
    mirrors.fetch();
    workspace.check();
  }

  void expect_same(const FloatTensor& rows, const Args& args) {
    sum_rows(rows, args);
    for (const int64_t chunk : {0, 64, 128, 512, 512}) {
      run(args, chunk);
      ASSERT_TRUE(got.is(want)) << "chunk " << chunk << (args.transpose_w != 0 ? " of dgrad" : " of down");
    }
  }

  void check() {
    run_network();
    if (::testing::Test::HasFatalFailure()) return;
    expect_same(net.y, down());
    if (::testing::Test::HasFatalFailure()) return;
    expect_same(net.dx_rows, dgrad());
  }
};

void check(const FfnCase& c, int32_t addend = 0, int32_t out = 0, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << c << " addend " << addend << " out " << out);
  const Network net(c, seed);
  Summed(net, addend, out == 0 ? c.dtype : out).check();
}

using GroupedMatmulCombineCuda = ExpertsCudaTest;

const std::vector<int32_t> kGroups = {3, 0, 64, 1, 70, 0, 9};  // 147 rows

TEST_F(GroupedMatmulCombineCuda, EveryOptionMatchesTwoOperations) {
  unsigned seed = 0;
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const Weighting weighting : {Weighting::none, Weighting::late, Weighting::early}) {
      for (const bool biases : {false, true}) {
        for (const int32_t addend : {0, static_cast<int>(AB_FLOAT32), static_cast<int>(AB_BFLOAT16)}) {
          for (const int32_t out : {0, static_cast<int>(AB_FLOAT32)}) {
            FfnCase c{kGroups, 160, ++seed % 3 == 0 ? 205 : 200, 72, seed % 2 + 1, 61, 3, dtype};
            c.weighting = weighting;
            c.biases = biases;
            check(c, addend, out, seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(GroupedMatmulCombineCuda, EveryWidthMatchesTwoOperations) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const int64_t D : {1, 13, 64, 72, 200, 300, 768, 2880, 4096}) {
      for (const bool biases : {false, true}) {
        FfnCase c{kUneven, 1300, D, 72, 2, 500, 3, dtype};  // more slots than rows, rows past the groups
        c.biases = biases;
        check(c, AB_FLOAT32);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// There are so many rows that the operation itself chooses chunks.
TEST_F(GroupedMatmulCombineCuda, ManyRowsRunInChunks) {
  const FfnCase c{{1000, 0, 7, 600}, 1700, 2880, 128, 2, 1700 / 4, 4};
  ASSERT_EQ(chunk_columns(c.R, c.E(), c.D, c.F, false), 1536);
  ASSERT_EQ(chunk_columns(c.R, c.E(), c.D, 2 * c.F, true), 1536);
  check(c, AB_FLOAT32);
}

TEST_F(GroupedMatmulCombineCuda, AcceptsEmptySizes) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    check({{2, 1}, 0, 8, 16, 2, 6, 2, dtype});  // R
    check({{2, 1}, 4, 0, 16, 2, 6, 2, dtype});  // D
    check({{2, 1}, 4, 8, 0, 2, 6, 2, dtype});   // F
    check({{}, 4, 8, 16, 2, 6, 2, dtype});      // E
    check({{2, 1}, 4, 8, 16, 2, 0, 2, dtype});  // T
    check({{0, 0, 0}, 5, 16, 8, 2, 4, 2, dtype});
    if (HasFatalFailure()) return;
  }
}

TEST_F(GroupedMatmulCombineCuda, ToleratesGarbageIndices) {
  for (const int64_t D : {200, 13}) {
    const Network net({kUneven, 1300, D, 72, 2, 500, 3});
    Summed summed(net, AB_FLOAT32, AB_BFLOAT16);
    fill_with_garbage(&summed.row_of_slot, net.c.R, 5);
    summed.check();
    if (HasFatalFailure()) return;
  }
  Network net({{2, INT32_MAX, INT32_MIN, 5}, 600, 200, 72, 2, 300, 2});
  fill_with_garbage(&net.slots, net.c.T * net.c.K, 6);
  Summed(net, 0, AB_BFLOAT16).check();
}

// Experts without rows contribute nothing, even if their weights are NaN. Padding rows of other experts count as zeros.
TEST_F(GroupedMatmulCombineCuda, NanInWeightsStaysOutOfPadding) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const bool biases : {false, true}) {
      Network net({{0, 40, 0, 30}, 80, 200, 24, 2, 50, 2, dtype, AB_SILU, Weighting::late, biases});
      for (FloatTensor* weights : {&net.w_in, &net.w_out}) {
        const int64_t each = weights->size() / net.c.E();
        for (const int64_t e : {0, 2}) {
          for (int64_t i = 0; i < each; ++i) weights->set(e * each + i, NAN);
        }
      }
      Summed summed(net, 0, dtype);
      for (int64_t slot = 0; slot < summed.row_of_slot.size(); ++slot) {  // name padding rows too
        summed.row_of_slot[slot] = static_cast<int32_t>(slot % net.c.R);
      }
      summed.check();
      if (HasFatalFailure()) return;
      for (int64_t i = 0; i < summed.got.size(); ++i) ASSERT_TRUE(std::isfinite(summed.got.get(i))) << i;

      net.w_out.set(net.w_out.size() / 4, NAN);  // expert 1, which has rows
      net.w_in.set(net.w_in.size() / 4, NAN);
      summed.check();
      if (HasFatalFailure()) return;
    }
  }
}

// The expert MLP has no GEMM with a bias and transposed weights, so the reference is the CPU.
TEST_F(GroupedMatmulCombineCuda, AcceptsABiasWithTransposedWeights) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    const Network net({kGroups, 160, 200, 72, 2, 61, 3, dtype});
    net.on_cpu();
    Summed summed(net, 0, AB_FLOAT32);
    Args args = summed.dgrad();
    args.bias = net.b_out.view();
    args.weights = net.weights.view();
    args.weight_early = 1;
    Args on_cpu = args;
    on_cpu.out = summed.want.view();
    EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, on_cpu));
    for (const int64_t chunk : {0, 64}) {
      summed.run(args, chunk);
      compare_elements("out", net.c, summed.got, summed.want, 0, summed.want.size());
      if (HasFatalFailure()) return;
    }
  }
}

// The Hopper kernels require 16-byte aligned addresses.
TEST_F(GroupedMatmulCombineCuda, UnalignedOperands) {
  const Network net({kGroups, 160, 200, 72, 2, 61, 3});
  net.on_cpu();
  Summed summed(net, AB_BFLOAT16, AB_BFLOAT16);
  Args args = summed.dgrad();
  Args on_cpu = args;
  on_cpu.out = summed.want.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, on_cpu));
  Mirrors mirrors;
  for (const auto member : {&Args::x, &Args::w, &Args::addend, &Args::out}) {
    args.*member = mirrors.add(args.*member, 2);
  }
  for (const auto member : {&Args::group_sizes, &Args::slot_of_row, &Args::row_of_slot}) {
    args.*member = mirrors.add(args.*member);
  }
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_combine_workspace(&args, nullptr, &bytes));
  DeviceWorkspace workspace(bytes);
  EXPECT_OK(ab_cuda_grouped_matmul_combine(&args, &workspace.exec()));
  mirrors.fetch();
  workspace.check();
  compare_elements("out", net.c, summed.got, summed.want, 0, summed.want.size());
}

TEST_F(GroupedMatmulCombineCuda, OutMayAliasTheAddend) {
  const Network net({kUneven, 1300, 768, 72, 2, 500, 3});
  Summed summed(net, AB_BFLOAT16, AB_BFLOAT16);
  summed.run_network();
  Args args = summed.dgrad();
  summed.sum_rows(net.dx_rows, args);
  Mirrors mirrors;
  Args copies = Summed::on_device(args, &mirrors);
  copies.out = copies.addend;
  CombinedSizes sizes;
  EXPECT_OK(anabranch::check(&copies, &sizes));
  DeviceWorkspace workspace(static_cast<size_t>(sizes.R * 128 * 2));
  cuda::Device device;
  EXPECT_OK(cuda::find_device("test", &device));
  EXPECT_OK(cuda::multiply_and_combine(copies, sizes, 128, workspace.exec().workspace, device, nullptr));
  mirrors.fetch();
  workspace.check();
  EXPECT_TRUE(summed.addend.is(summed.want));
}

// With skip_rest, rows past the groups are not written, and everything else has the same bits.
TEST_F(GroupedMatmulCombineCuda, SkipRestLeavesTailRows) {
  for (const bool biases : {false, true}) {
    FfnCase c{kUneven, 1300, 72, 136, 2, 500, 3};
    c.biases = biases;
    const Network net(c);
    Summed summed(net, AB_FLOAT32, AB_BFLOAT16);
    for (int32_t& row : summed.row_of_slot.values()) {
      if (row >= 0 && net.slot_of(row) < 0) row = -1;
    }
    summed.run_network();
    Network skipping(c);
    Summed half(skipping, 0, AB_BFLOAT16);
    const float before = NAN;
    for (FloatTensor* tensor : {&skipping.h, &skipping.dh, &half.a}) {
      for (int64_t i = 0; i < tensor->size(); ++i) tensor->set(i, before);
    }
    ab_expert_ffn_forward_args forward = skipping.forward_args();
    forward.a = half.a.view();
    forward.y = forward.w_out = forward.b_out = forward.weights = nullptr;
    forward.skip_rest = 1;
    Network::forward_on_gpu(forward);
    ab_expert_ffn_backward_args backward = skipping.backward_args();
    backward.skip_rest = 1;
    Network::backward_on_gpu(backward);
    const auto same_rows = [&](const char* name, const FloatTensor& got, const FloatTensor& want) {
      const int64_t width = want.size() / c.R;
      for (int64_t i = 0; i < want.size(); ++i) {
        const bool is_tail = i / width >= net.ends.back();
        const bool same = is_tail ? std::isnan(got.get(i)) : bits_of(got.get(i)) == bits_of(want.get(i));
        ASSERT_TRUE(same) << name << " row " << i / width << (is_tail ? " was written" : " differs");
      }
    };
    same_rows("h", skipping.h, net.h);
    same_rows("a", half.a, summed.a);
    same_rows("dh", skipping.dh, net.dh);
    EXPECT_TRUE(skipping.d_w_in.is(net.d_w_in) && skipping.d_b_in.is(net.d_b_in) && skipping.d_w_out.is(net.d_w_out) &&
                skipping.d_b_out.is(net.d_b_out) && skipping.d_weights.is(net.d_weights));
    Args args = summed.down();
    args.skip_rest = 1;
    summed.expect_same(net.y, args);
    args = summed.dgrad();
    args.skip_rest = 1;
    summed.expect_same(net.dx_rows, args);
  }
}

// Without y, the call writes the same `a` and h.
TEST_F(GroupedMatmulCombineCuda, WithoutYAAndHAreTheSame) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    for (const Weighting weighting : {Weighting::late, Weighting::early}) {
      for (const bool saves_h : {false, true}) {
        const FfnCase c{kUneven, 1300, 72, 136, 2, 500, 3, dtype, AB_SILU, weighting};
        const Network net(c);
        const Network alone(c);
        const Summed both(net, 0, dtype);
        both.run_network();
        const Summed half(alone, 0, dtype);
        ab_expert_ffn_forward_args args = alone.forward_args();
        args.a = half.a.view();
        args.y = args.w_out = args.b_out = nullptr;
        if (weighting != Weighting::early) args.weights = nullptr;
        if (!saves_h) args.h = nullptr;
        size_t bytes = 1;
        EXPECT_OK(ab_cuda_expert_ffn_forward_workspace(&args, nullptr, &bytes));
        EXPECT_EQ(bytes, 0u);
        Network::forward_on_gpu(args);
        EXPECT_TRUE(half.a.is(both.a));
        EXPECT_TRUE(!saves_h || alone.h.is(net.h));
        for (int64_t i = 0; i < half.a.size(); ++i) {
          ASSERT_TRUE(net.slot_of(i / c.F) >= 0 || half.a.get(i) == 0.0f) << "padding row " << i / c.F;
        }
      }
    }
  }
}

TEST_F(GroupedMatmulCombineCuda, ReplaysInAGraph) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    const Network net({kUneven, 1300, 768, 72, 2, 500, 3, dtype});
    Summed summed(net, AB_FLOAT32, dtype);
    summed.run_network();
    const Args args = summed.down();
    summed.sum_rows(net.y, args);
    Mirrors mirrors;
    const Args copies = Summed::on_device(args, &mirrors);
    CombinedSizes sizes;
    EXPECT_OK(anabranch::check(&copies, &sizes));
    cuda::Device device;
    EXPECT_OK(cuda::find_device("test", &device));
    DeviceWorkspace workspace(static_cast<size_t>(sizes.R * 64 * element_bytes_of(*args.x)));
    replay_in_graph([&](cudaStream_t stream) {
      EXPECT_OK(cuda::multiply_and_combine(copies, sizes, 64, workspace.exec().workspace, device, stream));
    });
    mirrors.fetch();
    workspace.check();
    EXPECT_TRUE(summed.got.is(summed.want));
  }
}

TEST(GroupedMatmulCombineWithoutCuda, BadArgumentsAreRefused) {
  const Network net({{2, 2}, 4, 8, 16, 2, 4, 2});
  const Summed summed(net, AB_FLOAT32, AB_BFLOAT16);
  size_t bytes = 0;
  Args args = summed.down();
  EXPECT_OK(ab_cuda_grouped_matmul_combine_workspace(&args, nullptr, &bytes));
  ab_exec exec{sizeof(exec), 0, nullptr, nullptr, bytes - 1};
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine(&args, &exec), AB_INVALID_ARGUMENT, "workspace: got 63 bytes");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  const FloatTensor odd({1, 1}, AB_BFLOAT16);
  args.bias = odd.view();
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine(&args, nullptr), AB_INVALID_ARGUMENT,
                 "bias: got bfloat16 (7) [1, 1], expected bfloat16 [E=2, N=8]");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine_workspace(&args, nullptr, &bytes), AB_INVALID_ARGUMENT, "bias: got");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine(nullptr, nullptr), AB_INVALID_ARGUMENT, "args: got NULL");
}

// The workspace sizes that the header states.
TEST(GroupedMatmulCombineWithoutCuda, WorkspaceMatchesTheHeader) {
  EXPECT_EQ(chunk_columns(524288, 256, 4096, 256, false), 960);  // no larger than W_in
  EXPECT_EQ(chunk_columns(524288, 256, 4096, 512, true), 960);
  EXPECT_EQ(chunk_columns(262144, 128, 4096, 1024, false), 4096);
  EXPECT_EQ(chunk_columns(262144, 128, 4096, 2048, true), 4096);
  EXPECT_EQ(chunk_columns(262145, 128, 4096, 2048, true), 2112);
  EXPECT_EQ(chunk_columns(65536, 32, 2880, 2880, false), 2880);
  EXPECT_EQ(chunk_columns(131072, 32, 2880, 2880, false), 1536);  // as large as W_out, since `a` is larger
  EXPECT_EQ(chunk_columns(262144, 128, 2048, 768, false), 1152);
  EXPECT_EQ(chunk_columns(262144, 64, 2048, 1024, false), 1152);  // the narrowest, larger than W_out
  EXPECT_EQ(chunk_columns(65536, 32, 2880, 5760, true), 2880);
  EXPECT_EQ(chunk_columns(1, 1, 2312, 8, true), 2312);
  EXPECT_EQ(chunk_columns(1 << 20, 8, 7168, 512, true), 960);
  EXPECT_EQ(chunk_columns(1 << 20, 8, 2880, 512, true), 960);
  EXPECT_EQ(chunk_columns(1 << 20, 8, 2048, 512, true), 1152);  // the second chunk has 896
  EXPECT_EQ(chunk_columns(1 << 20, 8, 2040, 512, true), 2040);  // halves would be too narrow
  EXPECT_EQ(chunk_columns(1 << 20, 1, 13, 7, false), 13);
  EXPECT_EQ(chunk_columns(1000, 1, 4096, 1, false), 4096);  // few rows
  EXPECT_EQ(chunk_columns(0, 0, 0, 0, true), 0);
  EXPECT_EQ(cuda::combined_columns(262144, 128, 2048, 1528, true, false), 1152);
  EXPECT_EQ(cuda::combined_columns(262144, 128, 2048, 1536, true, false), 1024);  // long sums
  EXPECT_EQ(cuda::combined_columns(262144, 128, 2048, 1536, false, false), 2048);
  EXPECT_EQ(cuda::combined_columns(262144, 128, 2048, 1528, true, true), 1024);
  const Network net({{200, 300}, 600, 13, 70, 2, 300, 2});
  const Summed summed(net, 0, AB_BFLOAT16);
  const Args args = summed.down();
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_combine_workspace(&args, nullptr, &bytes));
  EXPECT_EQ(bytes, static_cast<size_t>((600 * 13 * 2 + 63) / 64 * 64));
}

// Without a GPU, the call returns an error that names the reason.
TEST(GroupedMatmulCombineWithoutCuda, TheErrorNamesTheReason) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "a GPU is present";
  const Network net({{2, 2}, 4, 8, 16, 2, 4, 2});
  EXPECT_REFUSED(call(ab_cuda_grouped_matmul_combine, ab_cuda_grouped_matmul_combine_workspace,
                      Summed(net, 0, AB_BFLOAT16).down()),
                 AB_UNSUPPORTED, "grouped_matmul_combine: no usable GPU");
}

}  // namespace
}  // namespace anabranch::testing
