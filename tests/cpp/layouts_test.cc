// Weights whose strides describe an axis order other than row-major.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "experts_operands.h"

namespace anabranch::testing {
namespace {

using Order = std::vector<int>;  // the axes of a tensor in memory order, outermost first

// Permutes the memory of a tensor to another axis order and sets its strides to match.
class Reordered {
 public:
  Reordered(Floats& tensor, const Order& order) : tensor_(tensor), rank_(order.size()) {
    int64_t stride = 1;
    for (size_t i = rank_; i-- > 0;) {
      strides_[order[i]] = stride;
      stride *= std::max<int64_t>(tensor.view()->shape[order[i]], 1);
    }
    std::vector<float> moved(tensor.values().size());
    for (size_t i = 0; i < moved.size(); ++i) moved[offset_of(i)] = tensor.values()[i];
    std::copy(moved.begin(), moved.end(), tensor.values().begin());
    tensor.mutable_view()->strides = strides_;
  }
  Reordered(const Reordered&) = delete;
  Reordered& operator=(const Reordered&) = delete;

  // The values in row-major order.
  std::vector<double> values() const {
    std::vector<double> values(tensor_.values().size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = tensor_.values()[offset_of(i)];
    return values;
  }
  int64_t* strides() { return strides_; }

 private:
  // Memory offset of the i-th element in row-major order.
  size_t offset_of(size_t i) const {
    int64_t at = 0;
    for (size_t axis = rank_; axis-- > 0;) {
      const auto size = static_cast<size_t>(tensor_.view()->shape[axis]);
      at += static_cast<int64_t>(i % size) * strides_[axis];
      i /= size;
    }
    return static_cast<size_t>(at);
  }

  Floats& tensor_;
  size_t rank_;
  int64_t strides_[AB_MAX_RANK] = {};
};

struct Layout {
  Order in;
  Order out;
  Order intermediate;
};
const Layout kLayouts[] = {
    {{0, 1, 2, 3}, {0, 2, 1}, {0, 1, 2}}, {{0, 2, 3, 1}, {0, 1, 2}, {0, 1, 2}}, {{0, 2, 3, 1}, {0, 2, 1}, {0, 1, 2}},
    {{0, 1, 3, 2}, {0, 1, 2}, {0, 2, 1}}, {{0, 3, 2, 1}, {0, 2, 1}, {0, 2, 1}},
};

// A network whose weights, their gradients, b_in, h and dh have a given memory layout.
struct LaidOutNetwork {
  explicit LaidOutNetwork(const Layout& layout, int64_t width = 24, int64_t intermediate = 40)
      : net(65, 2, width, 2, intermediate, {90, 0, 1, 39}, slots_in_order(130)),
        w_in(net.w_in, layout.in),
        b_in(net.b_in, layout.intermediate),
        w_out(net.w_out, layout.out),
        h(net.h, layout.intermediate),
        dh(net.dh, layout.intermediate),
        d_w_in(net.d_w_in, layout.in),
        d_b_in(net.d_b_in, layout.intermediate),
        d_w_out(net.d_w_out, layout.out) {}

  Network<float> net;
  Reordered w_in, b_in, w_out, h, dh, d_w_in, d_b_in, d_w_out;
};

TEST(Layouts, ResultsMatchRowMajorWeights) {
  Network<float> want(65, 2, 24, 2, 40, {90, 0, 1, 39}, slots_in_order(130));
  EXPECT_OK(want.forward());
  EXPECT_OK(want.backward());
  for (const Layout& layout : kLayouts) {
    LaidOutNetwork laid(layout);
    EXPECT_OK(laid.net.forward());
    EXPECT_OK(laid.net.backward());
    const auto compare = [](const Floats& expected, const std::vector<double>& got, const char* name) {
      expect_near(expected, got, 1e-6, name);
    };
    const auto as_is = [](const Floats& values) {
      return std::vector<double>(values.values().begin(), values.values().end());
    };
    compare(want.y, as_is(laid.net.y), "y");
    compare(want.h, laid.h.values(), "h");
    compare(want.dh, laid.dh.values(), "dh");
    compare(want.dx_rows, as_is(laid.net.dx_rows), "dx_rows");
    compare(want.d_w_in, laid.d_w_in.values(), "d_w_in");
    compare(want.d_b_in, laid.d_b_in.values(), "d_b_in");
    compare(want.d_w_out, laid.d_w_out.values(), "d_w_out");
    compare(want.d_b_out, as_is(laid.net.d_b_out), "d_b_out");
    compare(want.d_weights, as_is(laid.net.d_weights), "d_weights");
  }
}

// Quantised operands have a fixed layout, so FP8 results do not depend on the layout of the weights.
TEST(Layouts, Fp8ResultsHaveTheSameBits) {
  const auto compute = [](Network<float>& net) {
    net.precision = AB_PRECISION_FP8;
    EXPECT_OK(net.forward());
    EXPECT_OK(net.backward());
  };
  const auto expect_same = [](const Floats& want, const std::vector<double>& got, const char* name) {
    EXPECT_TRUE(std::ranges::equal(want.values(), got)) << name;
  };
  Network<float> want(65, 2, 128, 2, 256, {90, 0, 1, 39}, slots_in_order(130));
  compute(want);
  for (const Layout& layout : std::span(kLayouts).subspan(2)) {
    LaidOutNetwork laid(layout, 128, 256);
    compute(laid.net);
    EXPECT_EQ(laid.net.y.values(), want.y.values());
    EXPECT_EQ(laid.net.dx_rows.values(), want.dx_rows.values());
    EXPECT_EQ(laid.net.d_weights.values(), want.d_weights.values());
    expect_same(want.h, laid.h.values(), "h");
    expect_same(want.dh, laid.dh.values(), "dh");
    expect_near(want.d_w_in, laid.d_w_in.values(), 1e-6, "d_w_in");
    expect_near(want.d_b_in, laid.d_b_in.values(), 1e-6, "d_b_in");
    expect_near(want.d_w_out, laid.d_w_out.values(), 1e-6, "d_w_out");

    // A later call that gets dh but not dh_q.
    ab_expert_ffn_backward_args later = laid.net.backward_args();
    later.h = later.d_out = nullptr;
    later.d_weights = later.d_w_in = later.d_b_in = later.d_w_out = later.d_b_out = nullptr;
    std::fill(laid.net.dx_rows.values().begin(), laid.net.dx_rows.values().end(), 0.0f);
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, later));
    EXPECT_EQ(laid.net.dx_rows.values(), want.dx_rows.values());
  }
}

// Tensors with a layout may be empty. With D = 0 the weights are empty, but h and b_in are not.
TEST(Layouts, AcceptsEmptyWeights) {
  for (const Layout& layout : kLayouts) {
    for (const auto& [width, intermediate] : {std::pair{0, 40}, std::pair{24, 0}, std::pair{0, 0}}) {
      Network<float> want(65, 2, width, 2, intermediate, {90, 0, 1, 39}, slots_in_order(130));
      EXPECT_OK(want.forward());
      EXPECT_OK(want.backward());
      LaidOutNetwork laid(layout, width, intermediate);
      EXPECT_OK(laid.net.forward());
      EXPECT_OK(laid.net.backward());
      expect_near(want.h, laid.h.values(), 1e-6, "h");
      expect_near(want.d_b_in, laid.d_b_in.values(), 1e-6, "d_b_in");
    }
  }
}

TEST(Layouts, OtherStridesAreRefused) {
  const Layout transposed = kLayouts[2];
  const auto refused = [&](auto change, const char* message) {
    LaidOutNetwork laid(transposed);
    EXPECT_OK(laid.net.forward());
    change(laid);
    EXPECT_REFUSED(laid.net.backward(), AB_INVALID_ARGUMENT, message);
  };
  refused([](LaidOutNetwork& laid) { laid.w_in.strides()[0] += 1; },
          "w_in: got unsupported strides");  // a gap between experts
  refused([](LaidOutNetwork& laid) { laid.w_in.strides()[1] = 2; }, "w_in: got unsupported strides");
  refused([](LaidOutNetwork& laid) { laid.w_out.strides()[2] = 0; }, "w_out: got unsupported strides");
  refused([](LaidOutNetwork& laid) { std::swap(laid.w_in.strides()[0], laid.w_in.strides()[3]); },
          "w_in: got unsupported strides");
  // A weight's gradient and the tensors that follow its layout must match it.
  refused([](LaidOutNetwork& laid) { laid.net.d_w_in.mutable_view()->strides = nullptr; }, "d_w_in: got");
  refused([](LaidOutNetwork& laid) { laid.net.d_w_out.mutable_view()->strides = nullptr; }, "d_w_out: got");
  refused([](LaidOutNetwork& laid) { std::swap(laid.h.strides()[1], laid.h.strides()[2]); },
          "h: got unsupported strides");
  refused([](LaidOutNetwork& laid) { laid.d_b_in.strides()[1] = 1; }, "d_b_in: got unsupported strides");
  // Rows must be row-major.
  int64_t strides[] = {1, 65};
  refused([&](LaidOutNetwork& laid) { laid.net.x.mutable_view()->strides = strides; }, "x: got strides");
}

}  // namespace
}  // namespace anabranch::testing
