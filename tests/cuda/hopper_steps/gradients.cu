// Gradients of weights: segments of groups, gathered rows, whole gradients against sums in double precision.
#include <algorithm>
#include <cstring>
#include <map>
#include <type_traits>

#include "experts/cuda/ops/tiles/segments.h"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/products.h"
#include "steps.h"

namespace anabranch::steps {
namespace {

using namespace anabranch::cuda;
using namespace anabranch::cuda::hopper;

// Rows of group e are ends[e - 1] ... ends[e] - 1.
std::vector<int64_t> ends_of(const std::vector<int32_t>& sizes, int64_t R) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (const int32_t size : sizes) ends.push_back(end = std::min<int64_t>(R, end + std::max(size, 0)));
  return ends;
}

template <class T>
std::vector<T> fetch(const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  STEP_CUDA(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// Every row of every group in one segment, partial results numbered expert after expert, longest segments first.
int check_segments(const char* name, const std::vector<int32_t>& sizes, int64_t R, int64_t D, int64_t N) {
  const auto E = static_cast<int64_t>(sizes.size());
  const SegmentBounds bounds = bound_segments(R, E, D, N);
  const DeviceArray<int32_t> device_sizes(sizes);
  const DeviceArray<char> workspace(static_cast<int64_t>(weight_gradient_bytes(R, E, D, N)));
  const SegmentList list = place_segments(bounds, workspace.data());
  int failures = fails(
      find_segments({device_sizes.data(), static_cast<int32_t>(E), static_cast<int32_t>(R)}, bounds, list, nullptr));
  workspace.check_guards(&failures);
  const SegmentCounts counts = fetch(list.counts, 1)[0];
  Comparison comparison(name);
  comparison.check(counts.segments >= 0 && counts.segments <= bounds.segments, 0, 0, counts.segments,
                   static_cast<double>(bounds.segments));
  comparison.check(counts.splits >= 0 && counts.splits <= bounds.partials / 2, 0, 1, counts.splits,
                   static_cast<double>(bounds.partials / 2));
  comparison.same(0, 2, counts.next_tile, 0);
  if (comparison.report(false) != 0) return failures + 1;
  const std::vector<Segment> segments = fetch(list.segments, counts.segments);
  const std::vector<Split> splits = fetch(list.splits, counts.splits);
  std::map<int, std::vector<Segment>> of_expert;
  int32_t longest = INT32_MAX;
  for (const Segment& segment : segments) {
    of_expert[segment.expert].push_back(segment);
    const int32_t length = segment.end - segment.begin;
    comparison.check(length <= bounds.rows, segment.expert, 10, length, static_cast<double>(bounds.rows));
    // Segments of a group but its last one are of one class; classes differ by a 31st of the bound.
    const bool last_of_several = segment.partial != kWhole && of_expert[segment.expert].size() > 1;
    if (last_of_several) continue;
    comparison.check(length <= longest + bounds.rows / 31 + 64, segment.expert, 11, length, longest);
    longest = std::min(longest, length);
  }
  const std::vector<int64_t> ends = ends_of(sizes, R);
  int32_t partials = 0;
  size_t split = 0;
  for (int64_t e = 0; e < E; ++e) {
    std::vector<Segment>& parts = of_expert[static_cast<int>(e)];
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    int64_t row = e == 0 ? 0 : ends[static_cast<size_t>(e - 1)];
    comparison.check(!parts.empty(), e, 20, 0, 1);
    for (size_t i = 0; i < parts.size(); ++i) {
      comparison.same(e, 21, parts[i].begin, row);
      comparison.same(e, 22, parts[i].partial, parts.size() == 1 ? kWhole : partials + static_cast<int64_t>(i));
      row = parts[i].end;
    }
    comparison.same(e, 23, row, ends[static_cast<size_t>(e)]);
    if (parts.size() < 2) continue;
    comparison.check(split < splits.size(), e, 24, static_cast<double>(split), static_cast<double>(splits.size()));
    if (split >= splits.size()) break;
    comparison.same(e, 25, splits[split].expert, e);
    comparison.same(e, 26, splits[split].first, partials);
    comparison.same(e, 27, splits[split].count, static_cast<int64_t>(parts.size()));
    ++split;
    partials += static_cast<int32_t>(parts.size());
  }
  comparison.same(-1, 28, static_cast<int64_t>(split), counts.splits);
  comparison.check(partials <= bounds.partials, -1, 29, partials, static_cast<double>(bounds.partials));
  return failures + comparison.report();
}

__global__ void gather_rows_as_k(GatheredRowsAsK<Side::columns> from, Tile tile, int k_blocks, uint16_t* words) {
  constexpr int kColumns = 192;
  constexpr int kBlockBytes = kColumns / kPanel * kPanelBytes;
  extern __shared__ __align__(1024) uint16_t panels[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier.init(kWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();
  KGather<Side::columns, kColumns> gather(from, tile);
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    gather.copy(shared_address(panels), tile, k_block);
    barrier.arrive_after_copies();
    barrier.wait(static_cast<uint32_t>(k_block & 1));
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBlockBytes / 2; i += kWarpgroup) {
      words[k_block * (kBlockBytes / 2) + i] = panels[i];
    }
    __syncthreads();
  }
}

// Slots of rows, 3 to a row of the source, some of them none of it.
std::vector<int32_t> random_slots(int64_t R, int32_t source_rows, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> slots(static_cast<size_t>(R));
  for (int32_t& slot : slots) {
    const int32_t none[] = {-1, INT32_MIN, INT32_MAX, 3 * source_rows};
    slot = static_cast<int32_t>(random() % static_cast<unsigned>(3 * source_rows));
    if (random() % 40 == 0) slot = none[random() % 4];
  }
  return slots;
}

struct Case {
  std::vector<int32_t> sizes;
  int64_t R;
  int64_t D;
  int64_t N;
};

constexpr int32_t kTopk = 3;

enum class Source { rows, gathered_x, gathered_d_y };

// A case on the device.
template <class Element>
struct Operands {
  Operands(const Case& c, unsigned seed)
      : shape(c),
        source_rows(static_cast<int32_t>(c.R / 2 + 1)),
        x(random_bits<Element>(c.R * c.D, seed)),
        d_y(random_bits<Element>(c.R * c.N, seed + 1)),
        slots(random_slots(c.R, source_rows, seed + 2)),
        sizes(c.sizes) {}

  WeightGradient gradient(Source source, void* d_w, int32_t d_w_dtype, bool accumulates) const {
    constexpr int32_t kDtype = std::is_same_v<Element, BFloat16> ? AB_BFLOAT16 : AB_FLOAT16;
    WeightGradient g;
    g.map = RowMap(slots.data(), int64_t{kTopk} * source_rows, kTopk);
    g.x = {x.data(), kDtype};
    g.gathers_x = source == Source::gathered_x;
    g.d_y = {d_y.data(), kDtype};
    g.gathers_d_y = source == Source::gathered_d_y;
    g.group_sizes = sizes.data();
    g.d_w = {d_w, d_w_dtype};
    g.accumulates = accumulates;
    g.R = shape.R;
    g.E = static_cast<int64_t>(shape.sizes.size());
    g.D = shape.D;
    g.N = shape.N;
    return g;
  }

  Case shape;
  int32_t source_rows;
  DeviceArray<uint16_t> x;
  DeviceArray<uint16_t> d_y;
  DeviceArray<int32_t> slots;
  DeviceArray<int32_t> sizes;
};

__device__ int64_t row_of(const RowMap& map, bool gathered, int64_t r) {
  if (!gathered) return r;
  const int64_t slot = map.slots[r];
  return slot >= 0 && slot < map.num_slots ? slot / map.topk : -1;
}

// The gradient in double precision, and the sum of the sizes of its terms; a thread an element.
template <class Element>
__global__ void reference(WeightGradient g, double* want, double* scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= g.E * g.D * g.N) return;
  const int64_t e = i / (g.D * g.N);
  int64_t begin = 0;
  int64_t end = 0;
  for (int64_t group = 0; group <= e; ++group) {
    begin = end;
    end = min(g.R, end + max(g.group_sizes[group], 0));
  }
  double sum = 0;
  double size = 0;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t x = row_of(g.map, g.gathers_x, r);
    const int64_t d_y = row_of(g.map, g.gathers_d_y, r);
    if (x < 0 || d_y < 0) continue;
    const double term = static_cast<double>(to_float(static_cast<const Element*>(g.x.data)[x * g.D + i / g.N % g.D])) *
                        to_float(static_cast<const Element*>(g.d_y.data)[d_y * g.N + i % g.N]);
    sum += term;
    size += fabs(term);
  }
  want[i] = sum;
  scale[i] = size;
}

struct Sums {
  template <class Element>
  Sums(const Operands<Element>& operands, Source source) {
    const WeightGradient g = operands.gradient(source, nullptr, AB_FLOAT32, false);
    const int64_t count = g.E * g.D * g.N;
    const DeviceArray<double> device_want(count);
    const DeviceArray<double> device_scale(count);
    reference<Element><<<static_cast<unsigned>((count + 255) / 256), 256>>>(g, device_want.data(), device_scale.data());
    STEP_CUDA(cudaGetLastError());
    int failures = 0;
    want = device_want.fetch(&failures);
    scale = device_scale.fetch(&failures);
  }
  std::vector<double> want;
  std::vector<double> scale;
};

// Out: of d_w. Rounding of the result, half a unit in the last place, and of float32 sums of which each addition may
// lose a unit; one more addition if it accumulates.
template <class Out, class Element>
int check(const Operands<Element>& operands, const Sums& sums, Source source, TileChoice tile, bool accumulates) {
  const Case& c = operands.shape;
  const auto count = static_cast<int64_t>(sums.want.size());
  std::mt19937 random(99);
  std::vector<Out> before(static_cast<size_t>(count));
  for (Out& value : before) value = from_float<Out>(accumulates ? static_cast<float>(random() % 1000) / 10 : NAN);
  const DeviceArray<Out> d_w(before);
  const int32_t dtype = std::is_same_v<Out, float> ? AB_FLOAT32 : operands.gradient(source, nullptr, 0, false).x.dtype;
  const WeightGradient g = operands.gradient(source, d_w.data(), dtype, accumulates);
  char name[160];
  const TileModel& model = *std::find_if(std::begin(kTileModels), std::end(kTileModels),
                                         [&](const TileModel& candidate) { return candidate.choice == tile; });
  std::snprintf(name, sizeof name, "%dx%d %s -> %s%s%s R %lld E %zu D %lld N %lld", model.rows, model.columns,
                std::is_same_v<Element, BFloat16> ? "bf16" : "f16", std::is_same_v<Out, float> ? "f32" : "the same",
                accumulates ? " accumulated" : "",
                source == Source::rows         ? ""
                : source == Source::gathered_x ? " x gathered"
                                               : " d_y gathered",
                static_cast<long long>(c.R), c.sizes.size(), static_cast<long long>(c.D), static_cast<long long>(c.N));
  if (hopper::why_not(g) != nullptr) {
    std::printf("  BAD  %s: not for the tensor cores\n", name);
    return 1;
  }
  const DeviceArray<char> workspace(static_cast<int64_t>(weight_gradient_bytes(g.R, g.E, g.D, g.N)));
  int failures = fails(hopper::multiply(g, tile, workspace.data(), multiprocessors(), nullptr));
  const std::vector<Out> got = d_w.fetch(&failures);
  workspace.check_guards(&failures);
  constexpr double kRound = std::is_same_v<Out, float> ? 0x1p-24 : std::is_same_v<Out, BFloat16> ? 0x1p-8 : 0x1p-11;
  Comparison comparison(name);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const double old = accumulates ? to_float(before[at]) : 0.0;
    const double want = old + sums.want[at];
    comparison.near(i / c.N, i % c.N, to_float(got[at]), want,
                    kRound * std::abs(want) + 0x1p-20 * sums.scale[at] + 0x1p-23 * old);
  }
  return failures + comparison.report(false);
}

template <class Element>
int check_ways(const Case& c, unsigned seed) {
  const Operands<Element> operands(c, seed);
  int failures = 0;
  int checks = 0;
  for (const Source source : {Source::rows, Source::gathered_x, Source::gathered_d_y}) {
    const Sums sums(operands, source);
    for (const TileModel& model : kTileModels) {
      failures += check<Element>(operands, sums, source, model.choice, false);
      failures += check<float>(operands, sums, source, model.choice, false);
      failures += check<float>(operands, sums, source, model.choice, true);
      checks += 3;
    }
  }
  const WeightGradient g = operands.gradient(Source::rows, nullptr, AB_FLOAT32, false);
  const SegmentBounds bounds = bound_segments(g.R, g.E, g.D, g.N);
  std::printf("  %-4s %s R %lld E %lld D %lld N %lld, segments of at most %lld rows: %d of %d checks failed\n",
              failures == 0 ? "ok" : "BAD", std::is_same_v<Element, BFloat16> ? "bf16" : "f16",
              static_cast<long long>(g.R), static_cast<long long>(g.E), static_cast<long long>(g.D),
              static_cast<long long>(g.N), static_cast<long long>(bounds.rows), failures, checks);
  return failures;
}

}  // namespace

int segments_of_groups() {
  int failures = 0;
  failures += check_segments("one short group", {300}, 300, 256, 256);
  failures += check_segments("one long group", {100000}, 100000, 256, 256);
  failures += check_segments("large weights: no splits", {100000}, 100000, 8192, 8192);
  failures += check_segments("no rows", {0, 0, 0}, 100, 64, 64);
  failures +=
      check_segments("empty, odd and long groups", {0, 1, 64, 0, 513, 512, 30000, 65, 0, 1025, 9999}, 50000, 512, 1536);
  failures += check_segments("sizes out of range", {-5, 2000, INT32_MIN, INT32_MAX, INT32_MAX, 7}, 9000, 64, 64);
  std::mt19937 random(17);
  for (const int E : {31, 32, 33, 129, 1023, 1024, 1025, 3000}) {
    std::vector<int32_t> sizes(static_cast<size_t>(E));
    int64_t R = 100;
    for (int32_t& size : sizes) {
      size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 700);
      if (random() % 20 == 0) size *= 20;
      R += size;
    }
    char name[64];
    std::snprintf(name, sizeof name, "%d groups", E);
    failures += check_segments(name, sizes, R, 256, 768);
  }
  return failures;
}

int gathered_rows_as_k() {
  constexpr int kSource = 90;
  constexpr int N = 456;
  constexpr int R = 400;
  constexpr int kBlockWords = 3 * kPanelBytes / 2;
  std::vector<uint16_t> values(static_cast<size_t>(kSource) * N);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i % 65521 + 1);
  const DeviceArray<uint16_t> source(values);
  const std::vector<int32_t> slots = random_slots(R, kSource, 5);
  const DeviceArray<int32_t> device_slots(slots);
  GatheredRowsAsK<Side::columns> from{};
  from.source = reinterpret_cast<const char*>(source.data());
  from.slots = device_slots.data();
  from.slots_per_row = Divisor(3);
  from.source_rows = kSource;
  from.row_chunks = N / 8;
  STEP_CUDA(cudaFuncSetAttribute(gather_rows_as_k, cudaFuncAttributeMaxDynamicSharedMemorySize, kBlockWords * 2));
  int failures = 0;
  for (const auto& [begin, end] : {std::pair{0, 64}, std::pair{37, 300}, std::pair{390, 400}}) {
    for (const int column : {0, 192, 384}) {
      const int k_blocks = (end - begin + 63) / 64;
      const Tile tile{.expert = 0, .row = 0, .end_row = 0, .column = column, .k = begin, .end_k = end};
      const DeviceArray<uint16_t> words(int64_t{k_blocks} * kBlockWords);
      gather_rows_as_k<<<1, kWarpgroup, kBlockWords * 2>>>(from, tile, k_blocks, words.data());
      STEP_CUDA(cudaGetLastError());
      const std::vector<uint16_t> got = words.fetch(&failures);
      char name[64];
      std::snprintf(name, sizeof name, "rows %d to %d, columns from %d", begin, end, column);
      Comparison comparison(name);
      for (int k = 0; k < k_blocks * 64; ++k) {
        const int32_t slot = begin + k < end ? slots[static_cast<size_t>(begin + k)] : -1;
        for (int j = 0; j < 192; ++j) {
          const bool real = slot >= 0 && slot < 3 * kSource && column + j < N;
          const int word =
              k / 64 * kBlockWords + j / 64 * (kPanelBytes / 2) + k % 64 * 64 + ((j % 64 / 8) ^ (k % 8)) * 8 + j % 8;
          comparison.same(k, j, got[static_cast<size_t>(word)],
                          real ? values[static_cast<size_t>(slot / 3 * N + column + j)] : 0);
        }
      }
      failures += comparison.report();
    }
  }
  return failures;
}

int gradients_of_groups() {
  int failures = 0;
  failures += check_ways<BFloat16>({{64}, 64, 128, 256}, 1);  // one k-block, one tile
  failures += check_ways<BFloat16>({{1}, 1, 8, 8}, 2);
  failures += check_ways<BFloat16>({{256, 0, 0, 384}, 640, 128, 192}, 3);  // as many k-blocks as a ring has stages
  failures += check_ways<BFloat16>({{0, 1, 128, 0, 63, 129, 127, 700, 0, 64, 65}, 1400, 264, 520}, 4);
  failures += check_ways<Float16>({{300, 17, 0, 500}, 900, 72, 328}, 5);
  failures += check_ways<BFloat16>({{0, 0}, 70, 136, 64}, 6);                                 // zeros alone
  failures += check_ways<BFloat16>({{-5, 90, INT32_MIN, INT32_MAX, 50}, 400, 64, 256}, 7);    // sizes out of range
  failures += check_ways<BFloat16>({{7000, 3, 0, 600, 1500, 512, 513}, 11000, 136, 200}, 8);  // groups that are cut
  failures += check_ways<Float16>({{4000}, 4000, 200, 520}, 9);
  std::vector<int32_t> sizes(200);
  std::mt19937 random(10);
  int64_t R = 77;
  for (int32_t& size : sizes) {
    size = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % 500);  // 0 to 8 k-blocks, many tiles a block
    R += size;
  }
  failures += check_ways<BFloat16>({sizes, R, 264, 392}, 10);
  return failures;
}

// The same bits every time, although blocks take tiles as they come, and launches follow each other with other shapes
// in one workspace.
int gradients_repeat() {
  const Operands<BFloat16> cut({{9000, 1, 0, 5000, 2000, 300, 900}, 17300, 256, 512}, 21);
  const Operands<BFloat16> whole({std::vector<int32_t>(40, 400), 16000, 128, 192}, 22);
  const auto size_of = [](const Operands<BFloat16>& o) {
    return static_cast<int64_t>(o.shape.sizes.size()) * o.shape.D * o.shape.N;
  };
  const DeviceArray<float> d_w(size_of(cut));
  const DeviceArray<uint16_t> d_w_other(size_of(whole));
  const WeightGradient g = cut.gradient(Source::gathered_x, d_w.data(), AB_FLOAT32, false);
  const WeightGradient other = whole.gradient(Source::rows, d_w_other.data(), AB_BFLOAT16, false);
  const DeviceArray<char> workspace(static_cast<int64_t>(
      std::max(weight_gradient_bytes(g.R, g.E, g.D, g.N), weight_gradient_bytes(other.R, other.E, other.D, other.N))));
  int failures = 0;
  std::vector<float> first;
  std::vector<uint16_t> first_other;
  Comparison comparison("60 runs have the same bits");
  for (int run = 0; run < 60; ++run) {
    d_w.poison();
    d_w_other.poison();
    const TileChoice tile = kTileModels[run % 3].choice;
    for (int i = 0; i < 3; ++i) {
      failures += fails(hopper::multiply(g, tile, workspace.data(), multiprocessors(), nullptr));
      failures += fails(hopper::multiply(other, tile, workspace.data(), multiprocessors(), nullptr));
    }
    const std::vector<float> got = d_w.fetch(&failures);
    const std::vector<uint16_t> got_other = d_w_other.fetch(&failures);
    if (run == 0) {
      first = got;
      first_other = got_other;
    }
    comparison.check(std::memcmp(got.data(), first.data(), first.size() * sizeof(float)) == 0, run, 0, 1, 0);
    comparison.check(got_other == first_other, run, 1, 1, 0);
  }
  workspace.check_guards(&failures);
  return failures + comparison.report();
}

// TFLOP/s of large gradients, median of 20, one row of every group's share and one group with a sixth of all rows.
int rate_of_gradients() {
  constexpr int64_t R = 98304;
  constexpr int64_t E = 64;
  constexpr int64_t D = 2048;
  constexpr int64_t N = 1536;
  cudaEvent_t begin;
  cudaEvent_t end;
  STEP_CUDA(cudaEventCreate(&begin));
  STEP_CUDA(cudaEventCreate(&end));
  int failures = 0;
  std::vector<int32_t> uneven(E, static_cast<int32_t>((R - R / 6) / (E - 1)));
  uneven[20] = static_cast<int32_t>(R / 6);
  for (const auto& [name, sizes] :
       {std::pair{"even", std::vector<int32_t>(E, R / E)}, std::pair{"one of a sixth", uneven}}) {
    const Operands<BFloat16> operands({sizes, R, D, N}, 41);
    const DeviceArray<uint16_t> d_w(E * D * N);
    for (const Source source : {Source::rows, Source::gathered_x, Source::gathered_d_y}) {
      const WeightGradient g = operands.gradient(source, d_w.data(), AB_BFLOAT16, false);
      const DeviceArray<char> workspace(static_cast<int64_t>(weight_gradient_bytes(g.R, g.E, g.D, g.N)));
      for (const TileModel& model : kTileModels) {
        std::vector<float> times;
        for (int i = 0; i < 23; ++i) {
          STEP_CUDA(cudaEventRecord(begin));
          failures += fails(hopper::multiply(g, model.choice, workspace.data(), multiprocessors(), nullptr));
          STEP_CUDA(cudaEventRecord(end));
          STEP_CUDA(cudaEventSynchronize(end));
          float milliseconds = 0;
          STEP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
          if (i >= 3) times.push_back(milliseconds);
        }
        std::sort(times.begin(), times.end());
        const double flops = 2.0 * static_cast<double>(R * D * N);
        std::printf("  %-15s %-13s %3dx%d: %.3f ms, %.0f TFLOP/s\n", name,
                    source == Source::rows         ? ""
                    : source == Source::gathered_x ? "x gathered"
                                                   : "d_y gathered",
                    model.rows, model.columns, times[times.size() / 2], flops / times[times.size() / 2] * 1e-9);
      }
    }
  }
  STEP_CUDA(cudaEventDestroy(begin));
  STEP_CUDA(cudaEventDestroy(end));
  return failures;
}

}  // namespace anabranch::steps
