// Runs networks with different thread orders and copy times. A missing barrier or wait would change the results.
#include <numeric>
#include <vector>

#include "emulator.h"
#include "packed_network.h"

namespace anabranch::testing {
namespace {

using emulation::Copies;
using emulation::Order;

class Orders : public ::testing::Test {
 protected:
  void TearDown() override { emulation::set_options({}); }
};

// Covers main loops longer than the pipeline, partial tiles in every dimension, and split sums.
TEST_F(Orders, ResultsHaveTheSameBitsInEveryOrder) {
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT32}) {
    for (const bool small : {true, false}) {
      const std::vector<int32_t> sizes = small ? std::vector<int32_t>{20, 0, 7} : std::vector<int32_t>{300, 0, 570};
      FfnCase c{sizes, small ? 30 : 880, 136, 72, 2, small ? 16 : 440, 2, dtype};
      c.layout = small ? 1 : 0;  // both orientations of the operands
      SCOPED_TRACE(::testing::Message() << c);
      const Network first(c);
      first.on_gpu();
      const Network cpu(c);
      cpu.on_cpu();
      compare(first, cpu);
      for (const emulation::Options options :
           {emulation::Options{Order::shuffled, Copies::late}, emulation::Options{Order::warps_forward, Copies::late},
            emulation::Options{Order::warps_backward, Copies::early}}) {
        emulation::set_options(options);
        const Network other(c);
        other.on_gpu();
        other.expect_same_bits(first);
        if (HasFailure()) return;
      }
      emulation::set_options({});
    }
  }
}

// The small-M GEMMs with packed weights. With the emulator's three multiprocessors and one expert, teams of the up GEMM
// have two warps, and CTAs have two or three rounds with the same rows: a warp may be a round ahead of the other. With
// two experts teams have one warp, and a team may be ahead when the rows of x change.
TEST_F(Orders, FewRowsOfPackedWeightsHaveTheSameBitsInEveryOrder) {
  for (const int32_t dtype : {AB_FLOAT4_E2M1X2, AB_FLOAT8_E4M3}) {
    for (const std::vector<int32_t>& sizes : {std::vector{1}, std::vector{3}, std::vector{2, 1}}) {
      const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
      LoraCase l;
      l.c = {sizes, rows, 1536, 512, 2, rows, 1};
      l.c.layout = kPfd;
      const Kinds kinds{dtype, dtype, dtype == AB_FLOAT4_E2M1X2 ? AB_FLOAT8_E8M0 : AB_FLOAT32};
      SCOPED_TRACE(::testing::Message() << l << " dtype " << dtype);
      const PackedNetwork cpu(l, kinds);
      cpu.network.on_cpu();
      for (const emulation::Options options :
           {emulation::Options{Order::shuffled, Copies::late}, emulation::Options{Order::warps_forward, Copies::early},
            emulation::Options{Order::warps_backward, Copies::late}}) {
        emulation::set_options(options);
        const PackedNetwork first(l, kinds), again(l, kinds);
        first.forward_on_gpu();
        if (HasFailure()) return;
        compare_rows("h", cpu.network.net, first.network.net.h, cpu.network.net.h);
        compare_rows("y", cpu.network.net, first.network.net.y, cpu.network.net.y);
        emulation::set_options({});
        again.forward_on_gpu();
        again.network.expect_same_bits(first.network);
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
