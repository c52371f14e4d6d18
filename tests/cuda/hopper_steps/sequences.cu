// Many tiles per CTA and several launches in a row. Results must not depend on the order in which loads, warpgroups and
// kernels run.
#include <iterator>
#include <memory>

#include "products.cuh"

namespace anabranch::steps {
namespace {

// Counts elements whose error exceeds the rounding bound, and NaN.
template <class Element>
__global__ void count_wrong(const Element* got, const double* want, const double* scale, int64_t count, double round,
                            unsigned long long* wrong) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const double error = fabs(to_float(got[i]) - want[i]);
    if (!(error <= round * fabs(want[i]) + 0x1p-20 * scale[i])) atomicAdd(wrong, 1ull);
  }
}

constexpr int kLaunches = 4;  // back to back

// Operands, references and results of one case.
struct Sequence {
  explicit Sequence(const Case& c, unsigned seed)
      : operands(c, seed), want(c.R * c.N), scale(c.R * c.N), flush(int64_t{128} << 20) {
    for (int i = 0; i < kLaunches; ++i) results.push_back(std::make_unique<DeviceArray<uint16_t>>(c.R * c.N));
  }
  void find_sums(bool transposed, bool gathers) const {
    const auto blocks = static_cast<unsigned>((operands.shape.R * operands.shape.N + 255) / 256);
    reference<BFloat16><<<blocks, 256>>>(operands.gemm(transposed), gathers ? operands.rows.data() : nullptr,
                                         want.data(), scale.data());
    STEP_CUDA(cudaGetLastError());
  }

  Operands<BFloat16> operands;
  DeviceArray<double> want;
  DeviceArray<double> scale;
  DeviceArray<uint16_t> flush;  // larger than the L2 cache
  std::vector<std::unique_ptr<DeviceArray<uint16_t>>> results;
};

// Launches kLaunches times, the first with a cold L2 cache. Returns the number of wrong elements in all results.
template <class Shape, Major kMajorB, bool kGathers>
int64_t run(const Sequence& s, bool overlaps, int* failures) {
  const DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>{0});
  for (const auto& y : s.results) y->fill_with_nan();
  s.flush.fill_with_nan();
  for (const auto& y : s.results) {
    *failures += fails(multiply<Shape, BFloat16, kMajorB, kGathers>(s.operands, y->data(), overlaps));
  }
  for (const auto& y : s.results) {
    count_wrong<<<1024, 256>>>(reinterpret_cast<const BFloat16*>(y->data()), s.want.data(), s.scale.data(),
                               s.operands.shape.R * s.operands.shape.N, 0x1p-8, wrong.data());
    STEP_CUDA(cudaGetLastError());
    y->check_guards(failures);
  }
  return static_cast<int64_t>(wrong.fetch(failures)[0]);
}

template <Major kMajorB, bool kGathers>
int run_shapes(const Sequence& s) {
  s.find_sums(kMajorB == Major::k, kGathers);
  int failures = 0;
  int64_t wrong[3][2];
  for (const bool overlaps : {false, true}) {
    wrong[0][overlaps] = run<InPairs<Tile128x128>, kMajorB, kGathers>(s, overlaps, &failures);
    wrong[1][overlaps] = run<InPairs<Tile128x192>, kMajorB, kGathers>(s, overlaps, &failures);
    wrong[2][overlaps] = run<InPairs<Tile128x256>, kMajorB, kGathers>(s, overlaps, &failures);
  }
  std::printf(
      "  D %4lld %-5s %-8s wrong elements, one by one / overlapping:", static_cast<long long>(s.operands.shape.D),
      kMajorB == Major::k ? "A B^T" : "A B", kGathers ? "gathered" : "");
  const char* shapes[] = {"128x128", "128x192", "128x256"};
  for (size_t i = 0; i < std::size(shapes); ++i) {
    std::printf("  %s %lld / %lld", shapes[i], static_cast<long long>(wrong[i][0]),
                static_cast<long long>(wrong[i][1]));
    failures += (wrong[i][0] != 0 ? 1 : 0) + (wrong[i][1] != 0 ? 1 : 0);
  }
  std::printf("\n");
  return failures;
}

}  // namespace

// Sums over 1 to 9 k-blocks: fewer than, equal to and more than the pipeline stages; the last one full or partial.
int sequences_of_gemms() {
  int failures = 0;
  for (const int64_t D : {64, 128, 192, 200, 256, 320, 384, 448, 512, 520}) {
    const Case c{{0, 1, 5000, 129, 0, 3333, 64, 7000, 65, 2500, 128, 127, 0, 4096, 9000, 300}, 33000, D, 776};
    const Sequence s(c, static_cast<unsigned>(D));
    failures += run_shapes<Major::mn, false>(s);
    failures += run_shapes<Major::k, false>(s);
    failures += run_shapes<Major::mn, true>(s);
    failures += run_shapes<Major::k, true>(s);
  }
  return failures;
}

}  // namespace anabranch::steps
