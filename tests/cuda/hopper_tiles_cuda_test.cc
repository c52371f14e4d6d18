// Every tile shape of Hopper's GEMMs against the CPU. The library picks one tile per GEMM by a model of cycles
// (tile_choice.h); here a whole network runs with each of them.
#include "experts/cuda/clear_padding.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/packed_path.h"
#include "experts/cuda/slot_gradient.h"
#include "experts/hopper/products.h"
#include "ffn_case.h"

namespace anabranch::testing {
namespace {

using cuda::hopper::TileChoice;

class HopperTilesCuda : public ExpertsCudaTest {
 protected:
  void SetUp() override {
    ExpertsCudaTest::SetUp();
    if (IsSkipped()) return;
    cudaDeviceProp properties;
    EXPECT_CUDA(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9) GTEST_SKIP() << "NO HOPPER GPU FOUND: " << properties.name;
    multiprocessors_ = properties.multiProcessorCount;
  }

  int multiprocessors_ = 0;
};

// The GEMMs of a network on the device, all with one tile.
class TiledNetwork {
 public:
  TiledNetwork(const Network& net, TileChoice tile, int multiprocessors)
      : net_(net),
        c_(net.c),
        tile_(tile),
        multiprocessors_(multiprocessors),
        a_({c_.R, c_.F}, c_.dtype),
        dots_({cuda::max_dot_parts(c_.F), c_.R}, AB_FLOAT32) {
    const Layout& layout = net.layout();
    s_.T = c_.by_slot() ? c_.T : 0;
    s_.K = c_.K;
    s_.R = c_.R;
    s_.E = c_.E();
    s_.D = c_.D;
    s_.P = c_.P;
    s_.F = c_.F;
    s_.dtype = c_.dtype;
    s_.layout = {layout.in.back() == 1, layout.intermediate().back() == 1, layout.out.back() == 1};
    map_ = RowMap(c_.by_slot() ? mirrors_.add(net.slots.view()) : nullptr, s_.T, s_.K, s_.R);
    sizes_ = static_cast<const int32_t*>(mirrors_.add(net.sizes.view())->data);
    if (c_.weighting != Weighting::none) weights_ = on_device(net.weights);
  }

  void run() {
    forward();
    backward();
    mirrors_.fetch();
  }

 private:
  using RowMap = cuda::RowMap;

  Floats on_device(const FloatTensor& tensor) { return Floats(mirrors_.add(tensor.view())); }

  template <class Operation>
  void describe(Operation& op) const {
    op.s = s_;
    op.map = map_;
    op.group_sizes = sizes_;
    op.activation = activation_of(c_.activation, alpha_of(c_.activation), limit_of(c_.activation));
  }

  void forward() {
    x_ = on_device(net_.x);
    w_in_ = on_device(net_.w_in);
    w_out_ = on_device(net_.w_out);
    if (c_.biases) b_out_ = on_device(net_.b_out);
    const Floats a = on_device(a_);
    cuda::Up up;
    describe(up);
    up.x = x_;
    up.w_in = w_in_;
    if (c_.biases) up.b_in = on_device(net_.b_in);
    if (c_.weighting == Weighting::early) up.weights = weights_;
    up.h = on_device(net_.h);
    up.a = a;
    EXPECT_EQ(cuda::hopper::unsupported_reason(up), nullptr);
    EXPECT_OK(cuda::hopper::launch_gemm(up, tile_, multiprocessors_, nullptr));
    cuda::RowsProduct down = rows_product(a, w_out_, s_.layout.out_transposed, on_device(net_.y), c_.F, c_.D);
    down.bias = b_out_.data;
    down.weights = weights_;
    down.weight_early = c_.weighting == Weighting::early;
    multiply(down);
  }

  void backward() {
    const Floats weighted_a = on_device(a_);
    const Floats d_out = on_device(net_.d_out);
    const Floats dh = on_device(net_.dh);
    cuda::IntermediateGradient gradient;
    describe(gradient);
    gradient.d_y = d_out;
    gradient.w_out = w_out_;
    gradient.weights = weights_;
    gradient.h = on_device(net_.saved_h);
    gradient.dh = dh;
    gradient.weighted_a = weighted_a;
    gradient.dots = static_cast<float*>(on_device(dots_).data);
    EXPECT_EQ(cuda::hopper::unsupported_reason(gradient), nullptr);
    EXPECT_OK(cuda::hopper::launch_gemm(gradient, tile_, multiprocessors_, nullptr));
    cuda::SlotGradient slots;
    slots.s = s_;
    slots.map = map_;
    slots.group_sizes = sizes_;
    slots.dots = gradient.dots;
    slots.parts = cuda::hopper::num_dot_parts(gradient);
    slots.d_y = d_out;
    slots.b_out = b_out_;
    slots.d_weights = static_cast<float*>(on_device(net_.d_weights).data);
    EXPECT_OK(cuda::compute_slot_gradient(slots, multiprocessors_, nullptr));
    const int64_t columns = c_.P * c_.F;
    multiply(rows_product(dh, w_in_, !s_.layout.in_transposed, on_device(net_.dx_rows), columns, c_.D));
    weight_gradient(weighted_a, false, c_.F, d_out, true, c_.D, s_.layout.out_transposed, net_.d_w_out);
    weight_gradient(x_, true, c_.D, dh, false, columns, s_.layout.in_transposed, net_.d_w_in);
  }

  cuda::RowsProduct rows_product(const Floats& x, const Floats& w, bool transposed, const Floats& y, int64_t D,
                                 int64_t N) const {
    return {.x = x.data,
            .w = w.data,
            .transposed = transposed,
            .group_sizes = sizes_,
            .y = y.data,
            .map = map_,
            .dtype = c_.dtype,
            .R = c_.R,
            .E = c_.E(),
            .D = D,
            .N = N};
  }

  void multiply(const cuda::RowsProduct& p) const {
    EXPECT_EQ(cuda::hopper::unsupported_reason(p), nullptr);
    EXPECT_OK(cuda::hopper::launch_gemm(p, tile_, multiprocessors_, nullptr));
    if (p.scales() || p.weighs_bias()) return;
    EXPECT_OK(cuda::clear_padding(p.map, {p.y, p.dtype}, p.R, p.N, multiprocessors_, nullptr));
  }

  void weight_gradient(const Floats& x, bool gathers_x, int64_t D, const Floats& d_y, bool gathers_d_y, int64_t N,
                       bool transposed, const FloatTensor& d_w) {
    cuda::WeightGradient g;
    g.map = map_;
    g.x = transposed ? d_y : x;
    g.gathers_x = transposed ? gathers_d_y : gathers_x;
    g.d_y = transposed ? x : d_y;
    g.gathers_d_y = transposed ? gathers_x : gathers_d_y;
    g.group_sizes = sizes_;
    g.d_w = on_device(d_w);
    g.accumulates = c_.accumulate;
    g.R = c_.R;
    g.E = c_.E();
    g.D = transposed ? N : D;
    g.N = transposed ? D : N;
    EXPECT_EQ(cuda::hopper::unsupported_reason(g), nullptr);
    DeviceWorkspace workspace(cuda::weight_gradient_bytes(g.R, g.E, g.D, g.N));
    EXPECT_OK(cuda::hopper::launch_gemm(g, tile_, workspace.exec().workspace, multiprocessors_, nullptr));
    workspace.check();
  }

  const Network& net_;
  const FfnCase& c_;
  TileChoice tile_;
  int multiprocessors_;
  FloatTensor a_;  // activations a, then w a
  FloatTensor dots_;
  Mirrors mirrors_;
  FfnSizes s_;
  RowMap map_;
  const int32_t* sizes_ = nullptr;
  Floats x_, w_in_, w_out_, b_out_, weights_;
};

// The kernels for packed weights, of 16 experts. No GPU is needed.
struct PackedCase {
  int32_t dtype = AB_BFLOAT16;
  int32_t weights = AB_FLOAT4_E2M1X2;
  int64_t R = 1 << 14;
  int64_t P = 2;
  bool interleaved = false;
  int64_t first_column = 0;

  void set_sizes(FfnSizes* s) const {
    s->R = s->T = R;
    s->E = 16;
    s->D = 256;
    s->P = P;
    s->F = 512;
    s->dtype = dtype;
    s->layout = {true, interleaved, true};
  }
  cuda::PackedPath of_up() const {
    alignas(16) static uint8_t memory[16];
    cuda::PackedUp up;
    set_sizes(&up.s);
    up.x = up.a = Floats(memory, dtype);
    up.packed = {memory, memory, weights, AB_FLOAT32, P * 512, 256};
    return chosen(up);
  }
  cuda::PackedPath of_intermediate_gradient() const {
    alignas(16) static uint8_t memory[16];
    cuda::PackedIntermediateGradient gradient;
    set_sizes(&gradient.s);
    gradient.d_y = gradient.h = gradient.dh = Floats(memory, dtype);
    gradient.packed = {memory, memory, weights, AB_FLOAT32, 256, 512};
    return chosen(gradient);
  }
  // transposed: down, whose sum is along the rows in memory; else d_x.
  cuda::PackedPath of_rows(bool transposed, bool weighted = false) const {
    alignas(16) static uint8_t memory[16];
    cuda::PackedRowsProduct rows;
    rows.x = rows.y = memory;
    rows.transposed = transposed;
    rows.dtype = dtype;
    rows.R = R;
    rows.E = 16;
    rows.D = 512;
    rows.N = rows.w_columns = 256;
    if (weighted) rows.weights = Floats(memory, AB_FLOAT32);
    rows.packed = {memory, memory, weights, AB_FLOAT32, 512, 512};
    rows.first_column = first_column;
    return chosen(rows);
  }

 private:
  template <class Operation>
  static cuda::PackedPath chosen(const Operation& operation) {
    auto path = cuda::PackedPath::unpacked;
    EXPECT_OK(cuda::choose_path(operation, cuda::Device{132, 90}, &path));
    return path;
  }
};

TEST(PackedPaths, DependOnRowsLayoutAndDtype) {
  using cuda::PackedPath;
  for (const int32_t weights : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
    EXPECT_EQ((PackedCase{.weights = weights}.of_up()), PackedPath::hopper);
    EXPECT_EQ((PackedCase{.weights = weights, .first_column = 128}.of_rows(true)), PackedPath::hopper);
    EXPECT_EQ((PackedCase{.weights = weights, .P = 1}.of_up()), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.dtype = AB_FLOAT16, .weights = weights}.of_up()), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.dtype = AB_FLOAT16, .weights = weights}.of_rows(true)), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.weights = weights}.of_rows(true, true)), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.weights = weights}.of_intermediate_gradient()), PackedPath::hopper);
    EXPECT_EQ((PackedCase{.weights = weights, .P = 1}.of_intermediate_gradient()), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.dtype = AB_FLOAT16, .weights = weights}.of_intermediate_gradient()), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.weights = weights, .R = 16}.of_intermediate_gradient()), PackedPath::unpacked);
    EXPECT_EQ((PackedCase{.weights = weights, .R = 16}.of_up()), PackedPath::few_rows);
    EXPECT_EQ((PackedCase{.weights = weights, .R = 16}.of_rows(true)), PackedPath::few_rows);
  }
  EXPECT_EQ((PackedCase{.interleaved = true}.of_up()), PackedPath::hopper);
  EXPECT_EQ((PackedCase{.weights = AB_FLOAT8_E4M3, .interleaved = true}.of_up()), PackedPath::unpacked);
  EXPECT_EQ((PackedCase{.interleaved = true}.of_intermediate_gradient()), PackedPath::hopper);
  EXPECT_EQ((PackedCase{.weights = AB_FLOAT8_E4M3, .interleaved = true}.of_intermediate_gradient()),
            PackedPath::unpacked);
  EXPECT_EQ((PackedCase{.first_column = 64}.of_rows(true)), PackedPath::hopper);
  EXPECT_EQ((PackedCase{.weights = AB_FLOAT8_E4M3, .first_column = 64}.of_rows(true)), PackedPath::unpacked);
  EXPECT_EQ((PackedCase{.first_column = 32}.of_rows(false)), PackedPath::hopper);
  EXPECT_EQ((PackedCase{.first_column = 16}.of_rows(false)), PackedPath::unpacked);
  EXPECT_EQ((PackedCase{.weights = AB_FLOAT8_E4M3, .first_column = 128}.of_rows(false)), PackedPath::hopper);
  EXPECT_EQ((PackedCase{.weights = AB_FLOAT8_E4M3, .first_column = 64}.of_rows(false)), PackedPath::unpacked);
  EXPECT_EQ((PackedCase{.R = 16}.of_rows(false)), PackedPath::unpacked);
}

TEST_F(HopperTilesCuda, EveryTileMatchesTheCpu) {
  unsigned seed = 1;
  for (const FfnCase& shape : {FfnCase{{1}, 1, 8, 8, 2, 1, 1}, FfnCase{{70}, 100, 128, 200, 2, 50, 2},
                               FfnCase{kUneven, 1300, 264, 328, 2, 500, 3}, FfnCase{kUneven, 1217, 72, 520, 2, 0, 0},
                               FfnCase{{5000, 0, 20, 1500}, 6600, 136, 72, 2, 3300, 2}}) {
    for (int variant = 0; variant < 12; ++variant) {
      FfnCase c = shape;
      c.layout = variant % 4;
      c.P = variant % 3 == 2 ? 1 : 2;
      c.dtype = variant % 2 == 0 ? AB_BFLOAT16 : AB_FLOAT16;
      c.activation = static_cast<int32_t>(seed % (c.P == 2 ? AB_SITU + 1 : AB_SWIGLU_CLAMPED));
      c.weighting = static_cast<Weighting>(variant % 3);
      c.biases = variant % 5 != 1;
      c.accumulate = variant >= 6;
      const Network want(c, ++seed);
      want.on_cpu();
      for (const cuda::hopper::TileModel& model : cuda::hopper::kTileModels) {
        SCOPED_TRACE(::testing::Message() << c << " tile " << model.rows << "x" << model.columns);
        const Network got(c, seed);
        TiledNetwork(got, model.choice, multiprocessors_).run();
        compare_rows("y", want, got.y, want.y);
        compare_rows("h", want, got.h, want.h);
        compare_rows("dh", want, got.dh, want.dh);
        compare_rows("dx_rows", want, got.dx_rows, want.dx_rows);
        compare_experts("d_w_in", c, got.d_w_in, want.d_w_in);
        compare_experts("d_w_out", c, got.d_w_out, want.d_w_out);
        compare_slots(want, got.d_weights, want.d_weights);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
