// bench_experts_cuda: the grouped products of an expert layer on this machine's GPU, beside cuBLAS.
//
//   bench_experts_cuda [--rows R] [--shape D,F,E]... [--repeats N]
//
// For every shape and routing, each product with every shape of tiles (* marks the one that the library takes), and one
// product of the same total size by cuBLAS where its library can be loaded. Random data, the L2 cache flushed before
// each call, the median of the repeats.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "experts/hopper/rows_product.h"

namespace {

using namespace anabranch;

#define CHECK_CUDA(expression)                                                                       \
  do {                                                                                               \
    const cudaError_t failure_ = expression;                                                         \
    if (failure_ != cudaSuccess) {                                                                   \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, cudaGetErrorString(failure_)); \
      std::exit(1);                                                                                  \
    }                                                                                                \
  } while (false)

// Uniform in [-1, 1) in bfloat16, from a hash of the place.
__global__ void fill_random(uint16_t* values, int64_t count, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t hash = (static_cast<uint32_t>(i) ^ static_cast<uint32_t>(i >> 32) ^ seed) * 2654435761u;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    values[i] = static_cast<uint16_t>(__float_as_uint(static_cast<float>(hash >> 8) * 0x1p-23f - 1.0f) >> 16);
  }
}

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) { CHECK_CUDA(cudaMalloc(&data_, bytes)); }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  void randomize(uint32_t seed) const {
    fill_random<<<4096, 256>>>(static_cast<uint16_t*>(data_), static_cast<int64_t>(bytes_ / 2), seed);
    CHECK_CUDA(cudaGetLastError());
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// One product of row-major matrices by cuBLAS, found at run time.
class Cublas {
 public:
  Cublas() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      library_ = dlopen(name, RTLD_NOW);
      if (library_ != nullptr) break;
    }
    if (library_ == nullptr) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    multiply_ = reinterpret_cast<Multiply>(dlsym(library_, "cublasGemmEx"));
    if (create == nullptr || multiply_ == nullptr || create(&handle_) != 0) multiply_ = nullptr;
  }
  bool found() const { return multiply_ != nullptr; }

  // y [R, N] = x [R, K] w, w [K, N] or transposed [N, K].
  bool run(const cuda::RowsProduct& p) const {
    constexpr int kBf16 = 14;     // CUDA_R_16BF
    constexpr int kFloat32 = 68;  // CUBLAS_COMPUTE_32F
    constexpr int kDefault = -1;  // CUBLAS_GEMM_DEFAULT
    const float one = 1;
    const float zero = 0;
    const int N = static_cast<int>(p.N);
    const int K = static_cast<int>(p.K);
    return multiply_(handle_, p.transposed ? 1 : 0, 0, N, static_cast<int>(p.R), K, &one, p.w, kBf16,
                     p.transposed ? K : N, p.x, kBf16, K, &zero, p.y, kBf16, N, kFloat32, kDefault) == 0;
  }

 private:
  using Multiply = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                           const void*, void*, int, int, int, int);
  void* library_ = nullptr;
  void* handle_ = nullptr;
  Multiply multiply_ = nullptr;
};

// Microseconds of a call, the median of the repeats.
template <class Call>
double time_of(int repeats, const Memory& flush, size_t flush_bytes, const Call& call) {
  constexpr int kWarmUp = 3;
  std::vector<cudaEvent_t> events(static_cast<size_t>(2 * repeats));
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = -kWarmUp; i < repeats; ++i) {
    CHECK_CUDA(cudaMemsetAsync(flush.data(), i & 0xff, flush_bytes));
    if (i >= 0) CHECK_CUDA(cudaEventRecord(events[static_cast<size_t>(2 * i)]));
    call();
    if (i >= 0) CHECK_CUDA(cudaEventRecord(events[static_cast<size_t>(2 * i + 1)]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(static_cast<size_t>(repeats));
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[2 * i], events[2 * i + 1]));
  }
  for (cudaEvent_t event : events) CHECK_CUDA(cudaEventDestroy(event));
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)] * 1e3;
}

// Rows of each expert when every row chooses one: all experts alike, or expert i with a share of 1 / (1 + i).
std::vector<int32_t> route(int64_t R, int E, bool zipf) {
  std::mt19937 random(5);
  std::vector<double> shares(static_cast<size_t>(E), 1.0);
  for (int e = 0; zipf && e < E; ++e) shares[static_cast<size_t>(e)] = 1.0 / (1 + e);
  std::shuffle(shares.begin(), shares.end(), random);
  std::discrete_distribution<int> choose(shares.begin(), shares.end());
  std::vector<int32_t> sizes(static_cast<size_t>(E), 0);
  for (int64_t r = 0; r < R; ++r) ++sizes[static_cast<size_t>(choose(random))];
  return sizes;
}

struct Options {
  int64_t rows = 262144;
  int repeats = 20;
  struct Shape {
    int64_t D;
    int64_t F;
    int E;
  };
  std::vector<Shape> shapes;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const char* value = arguments[i + 1];
    Options::Shape shape{};
    if (std::strcmp(arguments[i], "--rows") == 0) {
      options.rows = std::atoll(value);
    } else if (std::strcmp(arguments[i], "--repeats") == 0) {
      options.repeats = std::max(1, std::atoi(value));
    } else if (std::strcmp(arguments[i], "--shape") == 0 &&
               std::sscanf(value, "%ld,%ld,%d", &shape.D, &shape.F, &shape.E) == 3) {
      options.shapes.push_back(shape);
    } else {
      std::printf("got %s %s, expected --rows R, --shape D,F,E or --repeats N\n", arguments[i], value);
      std::exit(2);
    }
  }
  if (options.shapes.empty()) {
    options.shapes = {{768, 256, 128}, {1536, 1024, 32}, {2048, 768, 128}, {4096, 1024, 128}, {2880, 2880, 32}};
  }
  return options;
}

// A product of the layer: y [R, N] = x [R, K] w.
struct Named {
  const char* name;
  int64_t K;
  int64_t N;
  bool transposed;
};

void measure(const Options& options, const Options::Shape& shape, const Cublas& cublas, int multiprocessors) {
  constexpr size_t kFlush = size_t{256} << 20;
  const Memory flush(kFlush);
  const int64_t R = options.rows;
  const Named products[] = {{"up      x W_in", shape.D, 2 * shape.F, false},
                            {"down    a W_out", shape.F, shape.D, false},
                            {"dh      d_y W_out^T", shape.D, shape.F, true},
                            {"dgrad   dh W_in^T", 2 * shape.F, shape.D, true}};
  for (const Named& named : products) {
    const Memory x(static_cast<size_t>(R * named.K) * 2);
    const Memory w(static_cast<size_t>(shape.E * named.K * named.N) * 2);
    const Memory y(static_cast<size_t>(R * named.N) * 2);
    const Memory sizes(static_cast<size_t>(shape.E) * 4);
    x.randomize(1);
    w.randomize(2);
    cuda::RowsProduct p;
    p.x = x.data();
    p.w = w.data();
    p.transposed = named.transposed;
    p.group_sizes = static_cast<const int32_t*>(sizes.data());
    p.y = y.data();
    p.dtype = AB_BFLOAT16;
    p.R = R;
    p.E = shape.E;
    p.K = named.K;
    p.N = named.N;
    const double flops = 2.0 * static_cast<double>(R) * static_cast<double>(named.K * named.N);
    const auto rate = [&](double microseconds) { return flops / microseconds * 1e-6; };
    double peer = 0;
    if (cublas.found()) {
      bool ran = true;
      peer = rate(time_of(options.repeats, flush, kFlush, [&] { ran = cublas.run(p) && ran; }));
      if (!ran) peer = 0;
    }
    const cuda::TileChoice taken = cuda::choose_row_tile(R, shape.E, named.N, named.K, multiprocessors).choice;
    for (const bool zipf : {false, true}) {
      const std::vector<int32_t> rows = route(R, shape.E, zipf);
      CHECK_CUDA(cudaMemcpy(sizes.data(), rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
      std::printf("%5ld %5ld %4d  %-20s %-8s", static_cast<long>(shape.D), static_cast<long>(shape.F), shape.E,
                  named.name, zipf ? "zipf" : "uniform");
      double best = 0;
      for (const cuda::TileModel& model : cuda::kTileModels) {
        ab_status status{};
        const double microseconds = time_of(options.repeats, flush, kFlush, [&] {
          const ab_status call = cuda::multiply_rows(p, model.choice, multiprocessors, nullptr);
          if (call.code != AB_OK) status = call;
        });
        if (status.code != AB_OK) {
          std::printf("\n%s\n", status.message);
          return;
        }
        std::printf(" %8.1f us %4.0f%s", microseconds, rate(microseconds), model.choice == taken ? "*" : " ");
        if (model.choice == taken) best = rate(microseconds);
      }
      if (peer > 0) std::printf("   cuBLAS %4.0f   %.2f", peer, best / peer);
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  const Cublas cublas;
  std::printf("%s, %d multiprocessors; R = %ld rows, bfloat16; %s\n", properties.name, properties.multiProcessorCount,
              static_cast<long>(options.rows), cublas.found() ? "cuBLAS found" : "NO libcublas FOUND");
  std::printf("    D     F    E  product              routing ");
  for (const cuda::TileModel& model : cuda::kTileModels) std::printf("  %3dx%d TFLOP/s ", model.rows, model.columns);
  std::printf("\n");
  for (const Options::Shape& shape : options.shapes) measure(options, shape, cublas, properties.multiProcessorCount);
  return 0;
}
