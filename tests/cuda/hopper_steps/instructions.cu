// Tests single instructions and copies: the layout of operands in shared memory, and the results.
#include <algorithm>

#include "core/cuda/tensor_map.h"
#include "core/cuda/tma.cuh"
#include "core/cuda/wgmma.cuh"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/rows_epilogue.cuh"
#include "steps.h"

namespace anabranch::steps {
namespace {

using namespace anabranch::cuda;
using namespace anabranch::cuda::hopper;

// Index of element (i, k) of an operand in its panels, in 16-bit words. `major` is the operand's orientation.
__host__ __device__ int word_of(Major major, int i, int k) {
  const int row = major == Major::k ? i % kPanel : k;
  const int column = major == Major::k ? k : i % kPanel;
  return i / kPanel * (kPanelBytes / 2) + row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// d [64, kColumns] = a [64, 64] b [kColumns, 64]^T
template <int kColumns, Major kMajorA, Major kMajorB, class Element>
__global__ void multiply_panels(const uint16_t* a, const uint16_t* b, float* d) {
  extern __shared__ __align__(1024) uint16_t panels[];
  uint16_t* panels_b = panels + kPanelBytes / 2;
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 64; i += kWarpgroup) {
    panels[word_of(kMajorA, i / 64, i % 64)] = a[i];
  }
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * 64; i += kWarpgroup) {
    panels_b[word_of(kMajorB, i / 64, i % 64)] = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  float acc[kColumns / 2];
  fence_accumulators();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Wgmma<kColumns, kMajorA, kMajorB, Element>::begin(
        acc, make_descriptor(shared_address(panels)) + k * kNextK<kMajorA>,
        make_descriptor(shared_address(panels_b)) + k * kNextK<kMajorB>, k);
  }
  commit_products();
  wait_for_products<0>();
  finish_accumulators(acc);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[row * kColumns + column] = acc[i];
  }
}

template <int kColumns, Major kMajorA, Major kMajorB, class Element>
int check_panels(const char* element) {
  const auto a = random_bits<Element>(64 * 64, 1);
  const auto b = random_bits<Element>(kColumns * 64, 2);
  const DeviceArray<uint16_t> device_a(a);
  const DeviceArray<uint16_t> device_b(b);
  const DeviceArray<float> d(64 * kColumns);
  const int bytes = kPanelBytes * (1 + kColumns / kPanel);
  const auto kernel = multiply_panels<kColumns, kMajorA, kMajorB, Element>;
  STEP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, kWarpgroup, static_cast<size_t>(bytes)>>>(device_a.data(), device_b.data(), d.data());
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<float> got = d.fetch(&failures);
  char name[64];
  std::snprintf(name, sizeof name, "m64n%d A %s B %s %s", kColumns, kMajorA == Major::k ? "k" : "mn",
                kMajorB == Major::k ? "k" : "mn", element);
  Comparison comparison(name);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      double want = 0;
      for (int k = 0; k < 64; ++k) {
        want += static_cast<double>(value_of<Element>(a[static_cast<size_t>(m * 64 + k)])) *
                value_of<Element>(b[static_cast<size_t>(n * 64 + k)]);
      }
      comparison.near(m, n, got[static_cast<size_t>(m * kColumns + n)], want, 1e-4);
    }
  }
  return failures + comparison.report();
}

template <int kColumns>
int check_majors() {
  return check_panels<kColumns, Major::k, Major::k, BFloat16>("bf16") +
         check_panels<kColumns, Major::k, Major::mn, BFloat16>("bf16") +
         check_panels<kColumns, Major::mn, Major::k, BFloat16>("bf16") +
         check_panels<kColumns, Major::mn, Major::mn, BFloat16>("bf16") +
         check_panels<kColumns, Major::k, Major::mn, Float16>("f16");
}

// Loads one box by TMA and copies the shared memory that it fills to `words`.
template <class Coordinates>
__global__ void load_one(const __grid_constant__ CUtensorMap map, Coordinates at, int bytes, uint16_t* words) {
  extern __shared__ __align__(1024) uint16_t panels[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier.arrive_and_expect(static_cast<uint32_t>(bytes));
    load_box(map, shared_address(panels), barrier, at);
  }
  barrier.wait(0);
  for (int i = static_cast<int>(threadIdx.x); i < bytes / 2; i += static_cast<int>(blockDim.x)) words[i] = panels[i];
}

// Checks a box of rows x 64 elements in panels. source(row, column) returns the expected element.
template <class Coordinates, class Source>
int check_load(const char* name, const CUtensorMap& map, const Coordinates& at, int rows, const Source& source) {
  const int bytes = rows * kSwizzleBytes;
  const DeviceArray<uint16_t> words(bytes / 2);
  STEP_CUDA(cudaFuncSetAttribute(load_one<Coordinates>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  load_one<<<1, kWarpgroup, static_cast<size_t>(bytes)>>>(map, at, bytes, words.data());
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<uint16_t> got = words.fetch(&failures);
  Comparison comparison(name);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < 64; ++j) {
      comparison.same(i, j, got[static_cast<size_t>(word_of(Major::k, i, j))], source(i, j));
    }
  }
  return failures + comparison.report();
}

// Returns numbers that identify their position: distinct within 65521 elements and never 0.
std::vector<uint16_t> position_numbers(int64_t count) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = static_cast<uint16_t>(i % 65521 + 1);
  return values;
}

// The subtile buffers of a warp.
using Subtiles = char[2][kSubtileBytes];

// Writes 64 x kColumns accumulators to a tile, from its row 0 on. Element (row, column) is 256 row + column.
template <class Out, int kColumns>
__global__ void store_subtiles(const __grid_constant__ RowsEpilogue<Out> out, Tile tile, bool zeros) {
  extern __shared__ __align__(1024) char subtiles[];
  const int warp = warp_index();
  const int lane = lane_index();
  float acc[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    acc[i] = static_cast<float>((warp * 16 + lane / 4 + i / 2 % 2 * 8) * 256 + i / 4 * 8 + lane % 4 * 2 + i % 2);
  }
  SubtileWriter writer(reinterpret_cast<Subtiles*>(subtiles)[warp]);
  if (zeros) {
    writer.write_zeros<kColumns>(out, tile, warp * kSubtileRows);
  } else {
    writer.write<kColumns>(out, tile, warp * kSubtileRows, acc);
  }
  writer.finish();
}

template <class Out, int kColumns>
int check_store(const char* name, int32_t dtype, int R, int N, const Tile& tile, bool zeros) {
  const DeviceArray<Out> y(int64_t{R} * N);
  RowsEpilogue<Out> out;
  out.columns = N;
  if (fails(make_row_window_map("y", y.data(), dtype, N, kSubtileColumns<Out>, kSubtileRows, &out.map)) != 0) return 1;
  store_subtiles<Out, kColumns><<<1, kWarpgroup, 4 * sizeof(Subtiles)>>>(out, tile, zeros);
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<Out> got = y.fetch(&failures);
  Comparison comparison(name);
  for (int row = 0; row < R; ++row) {
    for (int column = 0; column < N; ++column) {
      const Out& value = got[static_cast<size_t>(row) * static_cast<size_t>(N) + static_cast<size_t>(column)];
      const bool inside = row >= tile.row && row < std::min(tile.end_row, tile.row + 64) && column >= tile.column &&
                          column < tile.column + kColumns;
      const float number = to_float(value);
      const float want = zeros ? 0.0f : static_cast<float>((row - tile.row) * 256 + column - tile.column);
      const bool right = inside ? number == to_float(from_float<Out>(want)) : std::isnan(number);
      comparison.check(right, row, column, number, inside ? want : NAN);
    }
  }
  return failures + comparison.report();
}

__global__ void gather_rows(GatherSource from, Tile tile, int k_block, uint16_t* words) {
  extern __shared__ __align__(1024) uint16_t panels[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier.init(kWarpgroup);
    fence_barrier_init();
  }
  __syncthreads();
  const RowGather<128> gather(from, tile);
  gather.copy(shared_address(panels), tile, k_block);
  barrier.arrive_after_copies();
  barrier.wait(0);
  for (int i = static_cast<int>(threadIdx.x); i < 128 * 64; i += kWarpgroup) words[i] = panels[i];
}

}  // namespace

int tensor_maps() {
  const DeviceArray<uint16_t> memory(1024 * 1024);
  int runtime = 0;
  int driver = 0;
  STEP_CUDA(cudaRuntimeGetVersion(&runtime));
  STEP_CUDA(cudaDriverGetVersion(&driver));
  cudaDeviceProp properties;
  STEP_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf(
      "  %s, compute capability %d.%d, %d multiprocessors, %d MiB L2, %zu bytes of shared memory a block, "
      "runtime %d, driver %d\n",
      properties.name, properties.major, properties.minor, properties.multiProcessorCount, properties.l2CacheSize >> 20,
      properties.sharedMemPerBlockOptin, runtime, driver);
  CUtensorMap map;
  int failures = 0;
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32}) {
    const int columns = dtype == AB_FLOAT32 ? 32 : 64;
    failures += fails(make_row_window_map("window", memory.data(), dtype, 1000, columns, 128, &map));
    failures += fails(make_row_window_map("subtile", memory.data(), dtype, 8, columns, kSubtileRows, &map));
    failures += fails(make_matrices_map("matrices", memory.data(), dtype, 3, 70, 200, columns, 64, &map));
    failures += fails(make_matrices_map("tall box", memory.data(), dtype, 3, 70, 200, columns, 256, &map));
  }
  return failures;
}

int wgmma_panels() { return check_majors<64>() + check_majors<128>() + check_majors<192>() + check_majors<256>(); }

int loads_of_boxes() {
  constexpr int R = 300;
  constexpr int D = 200;
  const std::vector<uint16_t> values = position_numbers(int64_t{R} * D);
  const DeviceArray<uint16_t> memory(values);
  const auto value = [&](int row, int column) { return values[static_cast<size_t>(row * D + column)]; };
  int failures = 0;
  CUtensorMap map;
  failures += fails(make_row_window_map("x", memory.data(), AB_BFLOAT16, D, 64, 128, &map));
  struct Window {
    const char* name;
    WindowCoordinates at;
  };
  for (const Window& window :
       {Window{"window, whole box", {0, 3, 131}}, Window{"window ends in the box", {64, 40, 75}},
        Window{"window, columns end too", {192, 200, 203}}, Window{"window at the end of memory", {128, 290, 300}}}) {
    const WindowCoordinates& at = window.at;
    failures += check_load(window.name, map, at, 128, [&](int i, int j) -> int {
      return at.row + i < at.end && at.column + j < D ? value(at.row + i, at.column + j) : 0;
    });
  }
  // View the same memory as 3 matrices of 100 rows.
  for (const int rows : {64, 256}) {
    failures += fails(make_matrices_map("w", memory.data(), AB_BFLOAT16, 3, 100, D, 64, rows, &map));
    for (const MatrixCoordinates& at : {MatrixCoordinates{0, 0, 1}, {64, 64, 0}, {192, 96, 1}, {128, 50, 2}}) {
      char name[64];
      std::snprintf(name, sizeof name, "matrix %d, box of %d rows at (%d, %d)", at.matrix, rows, at.row, at.column);
      failures += check_load(name, map, at, rows, [&](int i, int j) -> int {
        return at.row + i < 100 && at.column + j < D ? value(at.matrix * 100 + at.row + i, at.column + j) : 0;
      });
    }
  }
  return failures;
}

int stores_of_subtiles() {
  const Tile whole{.expert = 0, .row = 16, .end_row = 200, .column = 0};
  const Tile cut{.expert = 0, .row = 21, .end_row = 21 + 37, .column = 64};
  const Tile one{.expert = 0, .row = 99, .end_row = 100, .column = 128};
  int failures = 0;
  failures += check_store<BFloat16, 128>("bf16, whole", AB_BFLOAT16, 200, 320, whole, false);
  failures += check_store<BFloat16, 128>("bf16, rows end in the tile", AB_BFLOAT16, 200, 320, cut, false);
  failures += check_store<BFloat16, 256>("bf16, columns end in the tile", AB_BFLOAT16, 200, 136, cut, false);
  failures += check_store<Float16, 192>("f16, one row at the end of memory", AB_FLOAT16, 100, 200, one, false);
  failures += check_store<BFloat16, 128>("zeros, rows end in the tile", AB_BFLOAT16, 200, 320, cut, true);
  failures += check_store<float, 128>("f32, rows end in the tile", AB_FLOAT32, 200, 320, cut, false);
  failures += check_store<float, 256>("f32, columns end in the tile", AB_FLOAT32, 100, 132, one, false);
  return failures;
}

int gathered_rows() {
  constexpr int kSource = 90;
  constexpr int D = 136;
  constexpr int R = 200;
  const std::vector<uint16_t> values = position_numbers(kSource * D);
  const DeviceArray<uint16_t> source(values);
  std::mt19937 random(3);
  std::vector<int32_t> rows(R);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % kSource);
  rows[51] = -1;
  rows[60] = kSource;
  rows[61] = INT32_MAX;
  rows[62] = INT32_MIN;
  const DeviceArray<int32_t> device_rows(rows);
  const GatherSource from{reinterpret_cast<const char*>(source.data()), device_rows.data(), Divisor(1), kSource, D / 8};
  int failures = 0;
  for (const auto& [row, end] : {std::pair{0, 128}, std::pair{40, 110}, std::pair{150, 200}}) {
    for (const int k_block : {0, 1, 2}) {
      const Tile tile{.expert = 0, .row = row, .end_row = end, .k = 0, .end_k = D};
      const DeviceArray<uint16_t> words(128 * 64);
      STEP_CUDA(cudaFuncSetAttribute(gather_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * kPanelBytes));
      gather_rows<<<1, kWarpgroup, 2 * kPanelBytes>>>(from, tile, k_block, words.data());
      STEP_CUDA(cudaGetLastError());
      const std::vector<uint16_t> got = words.fetch(&failures);
      char name[64];
      std::snprintf(name, sizeof name, "rows %d to %d, k-block %d", row, end, k_block);
      Comparison comparison(name);
      for (int i = 0; i < 128; ++i) {
        const int32_t from_row = row + i < end ? rows[static_cast<size_t>(row + i)] : -1;
        for (int j = 0; j < 64; ++j) {
          const bool real = from_row >= 0 && from_row < kSource && k_block * 64 + j < D;
          comparison.same(i, j, got[static_cast<size_t>(word_of(Major::k, i, j))],
                          real ? values[static_cast<size_t>(from_row * D + k_block * 64 + j)] : 0);
        }
      }
      failures += comparison.report();
    }
  }
  return failures;
}

}  // namespace anabranch::steps
