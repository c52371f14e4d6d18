// Whole products against sums in double precision.
#include <algorithm>

#include "products.cuh"

namespace anabranch::steps {
namespace {

// Rounding of the result, half a unit in the last place, and of float32 sums of which each addition may lose a unit.
template <class Element>
int compare(const char* name, const Operands<Element>& operands, bool transposed, bool gathers) {
  const Case& c = operands.shape;
  const DeviceArray<double> want(c.R * c.N);
  const DeviceArray<double> scale(c.R * c.N);
  const auto blocks = static_cast<unsigned>((c.R * c.N + 255) / 256);
  reference<Element><<<blocks, 256>>>(operands.product(transposed), gathers ? operands.rows.data() : nullptr,
                                      want.data(), scale.data());
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<uint16_t> got = operands.y.fetch(&failures);
  const std::vector<double> sums = want.fetch(&failures);
  const std::vector<double> sizes = scale.fetch(&failures);
  constexpr double kRound = std::is_same_v<Element, BFloat16> ? 0x1p-8 : 0x1p-11;
  Comparison comparison(name);
  double error = 0;
  double norm = 0;
  for (int64_t i = 0; i < c.R * c.N; ++i) {
    const auto at = static_cast<size_t>(i);
    const double value = value_of<Element>(got[at]);
    const double tolerance = kRound * std::abs(sums[at]) + 0x1p-20 * sizes[at];
    comparison.near(i / c.N, i % c.N, value, sums[at], tolerance);
    error += (value - sums[at]) * (value - sums[at]);
    norm += sums[at] * sums[at];
  }
  const double relative = norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
  if (!(relative < kRound)) {
    std::printf("    %s: relative error %.3g, expected less than %.3g\n", name, relative, kRound);
    ++failures;
  }
  return failures + comparison.report();
}

template <class Shape, class Element, Major kMajorB, bool kGathers>
int check(const Case& c, unsigned seed) {
  const Operands<Element> operands(c, seed);
  if (fails(multiply<Shape, Element, kMajorB, kGathers>(operands)) != 0) return 1;
  char name[128];
  std::snprintf(name, sizeof name, "%s%dx%d %s %s%s R %lld E %lld D %lld N %lld",
                Shape::kBlocks == 1 ? "" : "pairs of ", Shape::kRows, Shape::kColumns,
                std::is_same_v<Element, BFloat16> ? "bf16" : "f16", kMajorB == Major::k ? "A B^T" : "A B",
                kGathers ? " gathered" : "", static_cast<long long>(c.R), static_cast<long long>(operands.E),
                static_cast<long long>(c.D), static_cast<long long>(c.N));
  return compare<Element>(name, operands, kMajorB == Major::k, kGathers);
}

template <class Shape>
int check_ways(const Case& c, unsigned seed) {
  return check<Shape, BFloat16, Major::mn, false>(c, seed) + check<Shape, BFloat16, Major::k, false>(c, seed + 10) +
         check<Shape, Float16, Major::mn, false>(c, seed + 20) + check<Shape, BFloat16, Major::mn, true>(c, seed + 30) +
         check<Shape, BFloat16, Major::k, true>(c, seed + 40);
}

int check_shapes(const Case& c, unsigned seed) {
  return check_ways<Tile128x128>(c, seed) + check_ways<Tile128x192>(c, seed) + check_ways<Tile128x256>(c, seed);
}

int check_pairs(const Case& c, unsigned seed) {
  return check_ways<InPairs<Tile128x128>>(c, seed) + check_ways<InPairs<Tile128x192>>(c, seed) +
         check_ways<InPairs<Tile128x256>>(c, seed);
}

}  // namespace

int products_of_one_tile() {
  int failures = 0;
  failures += check_shapes({{128}, 128, 64, 128}, 1);    // one k-block
  failures += check_shapes({{128}, 128, 256, 256}, 2);   // the ring once
  failures += check_shapes({{128}, 128, 1024, 192}, 3);  // the ring several times
  failures += check_shapes({{128}, 128, 1000, 136}, 4);  // a last k-block that is not full
  failures += check_shapes({{70}, 100, 128, 200}, 5);    // rows of no group
  failures += check_shapes({{1}, 1, 8, 8}, 6);
  return failures;
}

int products_of_groups() {
  int failures = 0;
  failures += check_pairs({{128}, 128, 256, 104}, 7);   // one tile, and none beside it
  failures += check_pairs({{256}, 256, 1000, 256}, 8);  // weights in common
  failures += check_pairs({{384}, 384, 1000, 776}, 9);
  failures += check_pairs({{0, 1, 128, 0, 0, 129, 127, 1500, 0, 64, 65}, 2200, 264, 520}, 11);
  failures += check_pairs({{300, 300, 300, 300}, 1200, 768, 768}, 12);
  failures += check_pairs({{0, 0, 0}, 300, 64, 64}, 13);
  std::vector<int32_t> sizes(150);
  std::mt19937 random(14);
  int64_t R = 77;
  for (int32_t& size : sizes) {
    size = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 400);
    R += size;
  }
  failures += check_pairs({sizes, R, 72, 328}, 15);
  return failures;
}

// The same bits every time, on many blocks that run at different speeds.
int products_repeat() {
  const Case c{{3000, 1, 0, 5000, 2000, 700, 900}, 12000, 512, 1024};
  const Operands<BFloat16> operands(c, 21);
  int failures = 0;
  std::vector<uint16_t> first;
  Comparison comparison("40 runs have the same bits");
  for (int run = 0; run < 40; ++run) {
    operands.y.poison();
    const ab_status status = run % 2 == 0 ? multiply<InPairs<Tile128x256>, BFloat16, Major::mn, false>(operands)
                                          : multiply<InPairs<Tile128x128>, BFloat16, Major::mn, false>(operands);
    failures += fails(status);
    const std::vector<uint16_t> got = operands.y.fetch(&failures);
    if (run == 0) first = got;
    comparison.check(got == first, run, 0, 1, 0);
  }
  return failures + comparison.report();
}

// TFLOP/s of one large product, median of 20; inputs of 0.4 GB flush the cache by themselves.
int rate_of_products() {
  const Case c{std::vector<int32_t>(16, 4096), 65536, 2048, 2048};
  const Operands<BFloat16> operands(c, 31);
  const int blocks = multiprocessors();
  cudaEvent_t begin;
  cudaEvent_t end;
  STEP_CUDA(cudaEventCreate(&begin));
  STEP_CUDA(cudaEventCreate(&end));
  int failures = 0;
  for (const bool transposed : {false, true}) {
    for (const TileModel& model : kTileModels) {
      std::vector<float> times;
      for (int i = 0; i < 23; ++i) {
        STEP_CUDA(cudaEventRecord(begin));
        failures += fails(hopper::multiply(operands.product(transposed), model.choice, blocks, nullptr));
        STEP_CUDA(cudaEventRecord(end));
        STEP_CUDA(cudaEventSynchronize(end));
        float milliseconds = 0;
        STEP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
        if (i >= 3) times.push_back(milliseconds);
      }
      std::sort(times.begin(), times.end());
      const double flops = 2.0 * static_cast<double>(c.R * c.D * c.N);
      std::printf("  %s %3dx%d: %.3f ms, %.0f TFLOP/s\n", transposed ? "A B^T" : "A B  ", model.rows, model.columns,
                  times[times.size() / 2], flops / times[times.size() / 2] * 1e-9);
    }
  }
  STEP_CUDA(cudaEventDestroy(begin));
  STEP_CUDA(cudaEventDestroy(end));
  return failures;
}

}  // namespace anabranch::steps
