// Runs networks with different thread orders and copy times. A missing barrier or wait would change the results.
#include <vector>

#include "emulator.h"
#include "ffn_case.h"

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
           {emulation::Options{Order::backward, Copies::early}, emulation::Options{Order::shuffled, Copies::late}}) {
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

}  // namespace
}  // namespace anabranch::testing
