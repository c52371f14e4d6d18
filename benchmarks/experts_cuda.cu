// bench_experts_cuda: times the grouped GEMMs of an expert layer on this machine's GPU, and cuBLAS.
//
//   bench_experts_cuda [--rows R] [--shape D,F,E]... [--products NAMES] [--topk K] [--repeats N]
//
// NAMES: some of up,down,dh,dgrad,dw_in,dw_out,down+sum,dgrad+sum.
//
// For every shape, GEMM and routing, times cuBLAS, if its library can be loaded, and our kernel with every tile shape
// (* marks the library's choice). For GEMMs over rows, cuBLAS computes one GEMM of the same total size; for weight
// gradients, a batch of equal GEMMs. GEMMs with a sum by token (K rows each) are timed with chunks of 576, 1152, the
// library's own number and all columns instead. Data is random, the L2 cache is flushed before each call, and times are
// medians of the repeats.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "anabranch/experts.h"
#include "cublas.h"
#include "experts/column_chunks.h"
#include "experts/cuda/grouped_matmul_combine.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/hopper/products.h"

namespace anabranch::bench {

namespace hopper = cuda::hopper;

[[noreturn]] void fail(const std::string& why) {
  std::printf("\n%s\n", why.c_str());
  std::exit(1);
}

#define CHECK_CUDA(expression)                                                                         \
  do {                                                                                                 \
    const cudaError_t failure_ = expression;                                                           \
    if (failure_ != cudaSuccess) fail(std::string(#expression) + ": " + cudaGetErrorString(failure_)); \
  } while (false)

// Uniform bfloat16 numbers in [-1, 1), from a hash of the index.
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
  explicit Memory(size_t bytes) : bytes_(bytes) { CHECK_CUDA(cudaMalloc(&data_, std::max<size_t>(bytes, 16))); }
  explicit Memory(const std::vector<int32_t>& values) : Memory(values.size() * sizeof(int32_t)) {
    CHECK_CUDA(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const int32_t* integers() const { return static_cast<const int32_t*>(data_); }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

class RandomMemory : public Memory {
 public:
  RandomMemory(int64_t rows, int64_t columns, uint32_t seed) : Memory(static_cast<size_t>(rows * columns) * 2) {
    fill_random<<<4096, 256>>>(static_cast<uint16_t*>(data()), rows * columns, seed);
    CHECK_CUDA(cudaGetLastError());
  }
};

// Returns the median time of a call in microseconds.
double time_of(int repeats, const std::function<void()>& call) {
  constexpr int kWarmUp = 3;
  const Memory flush(size_t{256} << 20);
  std::vector<cudaEvent_t> events(static_cast<size_t>(2 * repeats));
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = -kWarmUp; i < repeats; ++i) {
    CHECK_CUDA(cudaMemsetAsync(flush.data(), i & 0xff, flush.bytes()));
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

// Assigns each slot to a random expert, uniformly or with shares 1 / (1 + i). sizes: rows per expert. slots: the slot
// of each row, in order within an expert.
struct Routing {
  std::vector<int32_t> sizes;
  std::vector<int32_t> slots;

  Routing(int64_t R, int64_t E, bool zipf) : sizes(static_cast<size_t>(E), 0), slots(static_cast<size_t>(R)) {
    std::mt19937 random(5);
    std::vector<double> shares(static_cast<size_t>(E), 1.0);
    for (size_t e = 0; zipf && e < shares.size(); ++e) shares[e] = 1.0 / (1.0 + static_cast<double>(e));
    std::shuffle(shares.begin(), shares.end(), random);
    std::discrete_distribution<int> choose(shares.begin(), shares.end());
    std::vector<int> experts(slots.size());
    for (int& expert : experts) ++sizes[static_cast<size_t>(expert = choose(random))];
    std::vector<int32_t> rows(sizes.size(), 0);
    std::partial_sum(sizes.begin(), sizes.end() - 1, rows.begin() + 1);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      slots[static_cast<size_t>(rows[static_cast<size_t>(experts[slot])]++)] = static_cast<int32_t>(slot);
    }
  }
};

struct Shape {
  long D;
  long F;
  long E;
};

struct Options {
  long rows = 262144;
  int repeats = 20;
  int topk = 8;
  std::string products;
  std::vector<Shape> shapes;
};

// GEMMs of the layer. Over rows: y [R, N] = x [R, D] w. Weight gradients: d_w [D, N] = x^T d_y.
enum class Kind { rows, up, intermediate_gradient, gradient, gradient_gathered_x, gradient_gathered_d_y, combined };
struct Named {
  const char* name;
  const char* formula;
  Kind kind;
  bool transposed;
  long (*inner)(const Shape&);  // contracted dimension; for weight gradients: rows of the result
  long (*N)(const Shape&);
};
constexpr long width(const Shape& s) { return s.D; }
constexpr long half(const Shape& s) { return s.F; }
constexpr long both(const Shape& s) { return 2 * s.F; }
constexpr Named kProducts[] = {
    {"up", "x W_in", Kind::rows, false, width, both},
    {"up", "act(gather(x) W_in)", Kind::up, false, width, both},
    {"down", "a W_out", Kind::rows, false, half, width},
    {"dh", "d_y W_out^T", Kind::rows, true, width, half},
    {"dh", "dh, w a, d_w", Kind::intermediate_gradient, true, width, half},
    {"dgrad", "dh W_in^T", Kind::rows, true, both, width},
    {"dw_in", "x^T dh", Kind::gradient, false, width, both},
    {"dw_in", "gather(x)^T dh", Kind::gradient_gathered_x, false, width, both},
    {"dw_out", "a^T d_y", Kind::gradient, false, half, width},
    {"dw_out", "a^T gather(d_out)", Kind::gradient_gathered_d_y, false, half, width},
    {"down+sum", "sum_k w a W_out", Kind::combined, false, half, width},
    {"dgrad+sum", "sum_k dh W_in^T", Kind::combined, true, both, width},
};

double flops_of(const Options& options, const Named& named, const Shape& shape) {
  return 2.0 * static_cast<double>(options.rows) * static_cast<double>(named.inner(shape)) *
         static_cast<double>(named.N(shape));
}

hopper::TileChoice library_tile(const Options& options, const Named& named, const Shape& shape, int multiprocessors) {
  const long D = named.inner(shape);
  const long N = named.N(shape);
  switch (named.kind) {
    case Kind::rows:
      return hopper::choose_row_tile(options.rows, shape.E, N, D, named.transposed, multiprocessors).choice;
    case Kind::up:
    case Kind::intermediate_gradient:
      return hopper::choose_fused_tile(options.rows, shape.E, N, D, multiprocessors).choice;
    default:
      return hopper::choose_weight_tile(options.rows, shape.E, D, N, named.kind != Kind::gradient, multiprocessors)
          .choice;
  }
}

void check(const ab_status& status) {
  if (status.code != AB_OK) fail(status.message);
}

// Prints a column: microseconds, TFLOP/s and a mark of the library's choice.
double print_column(double microseconds, double flops, bool is_library_choice) {
  const double rate = flops / microseconds * 1e-6;
  std::printf(" %8.1f us %4.0f%s", microseconds, rate, is_library_choice ? "*" : " ");
  std::fflush(stdout);
  return rate;
}

// Like measure(), for a GEMM with a sum by token. The columns are chunk widths.
void measure_combined(const Options& options, const Shape& shape, const Named& named, bool zipf) {
  const int64_t T = options.rows / options.topk;
  const int64_t R = T * options.topk;
  const int64_t D = named.inner(shape);
  const int64_t N = named.N(shape);
  const Routing routing(R, shape.E, zipf);
  std::vector<int32_t> rows(routing.slots.size());
  for (size_t r = 0; r < rows.size(); ++r) rows[static_cast<size_t>(routing.slots[r])] = static_cast<int32_t>(r);
  const Memory sizes(routing.sizes), slots(routing.slots), row_of_slot(rows);
  const RandomMemory x(R, D, 1), w(shape.E * D, N, 2), weights(R, 1, 3), addend(T, N, 4);
  const Memory out(static_cast<size_t>(T * N) * 2);
  const auto view = [](const Memory& memory, int32_t dtype, std::initializer_list<int64_t> axes) {
    ab_tensor tensor{memory.data(), dtype, static_cast<int32_t>(axes.size()), {}, nullptr};
    std::copy(axes.begin(), axes.end(), tensor.shape);
    return tensor;
  };
  const ab_tensor views[] = {
      view(x, AB_BFLOAT16, {R, D}),
      named.transposed ? view(w, AB_BFLOAT16, {shape.E, N, D}) : view(w, AB_BFLOAT16, {shape.E, D, N}),
      view(sizes, AB_INT32, {shape.E}),
      view(slots, AB_INT32, {R}),
      view(row_of_slot, AB_INT32, {T, options.topk}),
      view(weights, AB_BFLOAT16, {T, options.topk}),
      view(addend, AB_BFLOAT16, {T, N}),
      view(out, AB_BFLOAT16, {T, N})};
  ab_grouped_matmul_combine_args args{};
  args.size = sizeof(args);
  args.transpose_w = named.transposed ? 1 : 0;
  args.backward = args.transpose_w;
  args.x = &views[0];
  args.w = &views[1];
  args.group_sizes = &views[2];
  args.slot_of_row = &views[3];
  args.row_of_slot = &views[4];
  args.weights = named.transposed ? nullptr : &views[5];  // as in the layer
  args.addend = named.transposed ? &views[6] : nullptr;
  args.out = &views[7];
  CombinedSizes combined;
  check(anabranch::check(&args, &combined));
  cuda::Device device;
  check(cuda::find_device("bench", &device));
  const long own = chunk_columns(options.rows, shape.E, N, D, named.transposed);
  for (const long columns : {std::min<long>(576, N), std::min<long>(1152, N), own, static_cast<long>(N)}) {
    const Memory buffer(static_cast<size_t>(R * columns) * 2);
    const double microseconds = time_of(options.repeats, [&] {
      check(cuda::multiply_and_combine(args, combined, columns, buffer.data(), device, nullptr));
    });
    std::printf("  %5ld:", columns);
    print_column(microseconds, flops_of(options, named, shape), columns == own);
  }
}

// Prints a column per tile shape, and cuBLAS.
void measure(const Options& options, const Shape& shape, const Named& named, bool zipf, int multiprocessors,
             const Cublas& cublas) {
  if (named.kind == Kind::combined) return measure_combined(options, shape, named, zipf);
  const int64_t R = options.rows;
  const int64_t D = named.inner(shape);
  const int64_t N = named.N(shape);
  const Routing routing(R, shape.E, zipf);
  const Memory sizes(routing.sizes);
  const Memory slots(routing.slots);
  const RandomMemory x(R, D, 1);
  const bool fused = named.kind == Kind::up || named.kind == Kind::intermediate_gradient;
  const bool over_rows = named.kind == Kind::rows || fused;
  const RandomMemory other(over_rows ? shape.E * D : R, N, 2);  // w or d_y
  const Memory result(static_cast<size_t>(over_rows ? R : shape.E * D) * static_cast<size_t>(N) * 2);

  cuda::RowsProduct p;
  p.x = x.data();
  p.w = other.data();
  p.transposed = named.transposed;
  p.group_sizes = sizes.integers();
  p.y = result.data();
  p.dtype = AB_BFLOAT16;
  p.R = R;
  p.E = shape.E;
  p.D = D;
  p.N = N;
  cuda::WeightGradient g;
  const cuda::RowMap map(slots.integers(), R / options.topk * options.topk, options.topk);
  g.map = map;
  g.x = {x.data(), AB_BFLOAT16};
  g.gathers_x = named.kind == Kind::gradient_gathered_x;
  g.d_y = {other.data(), AB_BFLOAT16};
  g.gathers_d_y = named.kind == Kind::gradient_gathered_d_y;
  g.group_sizes = sizes.integers();
  g.d_w = {result.data(), AB_BFLOAT16};
  g.R = R;
  g.E = shape.E;
  g.D = D;
  g.N = N;
  if (const char* why = over_rows ? hopper::unsupported_reason(p) : hopper::unsupported_reason(g)) fail(why);
  const Memory workspace(over_rows ? 0 : cuda::weight_gradient_bytes(g.R, g.E, g.D, g.N));
  const Memory activations(fused ? static_cast<size_t>(R * half(shape)) * 2 : 0);
  const Memory dots(fused ? static_cast<size_t>(R * hopper::ceil_div(half(shape), 128)) * sizeof(float) : 0);
  const Memory weights(fused ? static_cast<size_t>(R) * sizeof(float) : 0);
  const RandomMemory h(named.kind == Kind::intermediate_gradient ? R : 0, both(shape), 3);
  const auto run_fused = [&](hopper::TileChoice tile) {
    const auto fill = [&](auto& op) {
      op.s = {R / options.topk, options.topk, R, shape.E, width(shape), 2, half(shape)};
      op.map = map;
      op.group_sizes = sizes.integers();
    };
    if (named.kind == Kind::up) {
      cuda::Up op;
      fill(op);
      op.x = {x.data(), AB_BFLOAT16};
      op.w_in = {other.data(), AB_BFLOAT16};
      op.h = {result.data(), AB_BFLOAT16};
      op.a = {activations.data(), AB_BFLOAT16};
      return hopper::launch_gemm(op, tile, multiprocessors, nullptr);
    }
    cuda::IntermediateGradient op;
    fill(op);
    op.weights = {weights.data(), AB_FLOAT32};
    op.d_y = {x.data(), AB_BFLOAT16};
    op.w_out = {other.data(), AB_BFLOAT16};
    op.h = {h.data(), AB_BFLOAT16};
    op.dh = op.h;  // in place
    op.weighted_a = {activations.data(), AB_BFLOAT16};
    op.dots = static_cast<float*>(dots.data());
    return hopper::launch_gemm(op, tile, multiprocessors, nullptr);
  };

  const double flops = flops_of(options, named, shape);
  const hopper::TileChoice choice = library_tile(options, named, shape, multiprocessors);
  double ours = 0;
  for (const hopper::TileModel& model : hopper::kTileModels) {
    if (named.kind != Kind::rows && named.kind != Kind::gradient && !hopper::leaves_registers(model)) {
      std::printf("             -    ");
      continue;
    }
    const double microseconds = time_of(options.repeats, [&] {
      check(fused       ? run_fused(model.choice)
            : over_rows ? hopper::launch_gemm(p, model.choice, multiprocessors, nullptr)
                        : hopper::launch_gemm(g, model.choice, workspace.data(), multiprocessors, nullptr));
    });
    const double rate = print_column(microseconds, flops, model.choice == choice);
    if (model.choice == choice) ours = rate;
  }
  if (cublas.found()) {
    const double microseconds = time_of(options.repeats, [&] { over_rows ? cublas.run(p) : cublas.run(g); });
    const double rate = flops / microseconds * 1e-6;
    std::printf("   cuBLAS %4.0f   %.2f", rate, ours / rate);
  }
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const char* value = i + 1 < count ? arguments[i + 1] : "";
    Shape shape{};
    if (std::strcmp(arguments[i], "--rows") == 0 && std::atol(value) > 0) {
      options.rows = std::atol(value);
    } else if (std::strcmp(arguments[i], "--repeats") == 0 && std::atoi(value) > 0) {
      options.repeats = std::atoi(value);
    } else if (std::strcmp(arguments[i], "--topk") == 0 && std::atoi(value) > 0) {
      options.topk = std::atoi(value);
    } else if (std::strcmp(arguments[i], "--products") == 0) {
      options.products = std::string(",") + value + ",";
    } else if (std::strcmp(arguments[i], "--shape") == 0 &&
               std::sscanf(value, "%ld,%ld,%ld", &shape.D, &shape.F, &shape.E) == 3 && shape.D > 0 && shape.F > 0 &&
               shape.E > 0) {
      options.shapes.push_back(shape);
    } else {
      std::printf("got %s %s, expected --rows R, --shape D,F,E, --products NAMES, --topk K or --repeats N\n",
                  arguments[i], value);
      std::exit(2);
    }
  }
  if (options.shapes.empty()) {
    options.shapes = {{768, 256, 128}, {1536, 1024, 32}, {2048, 768, 128}, {4096, 1024, 128}, {2880, 2880, 32}};
  }
  return options;
}

}  // namespace anabranch::bench

int main(int count, char** arguments) {
  using namespace anabranch::bench;
  const Options options = parse(count, arguments);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  const anabranch::Cublas cublas;
  std::printf("%s, %d multiprocessors; R = %ld rows, bfloat16; %s\n", properties.name, properties.multiProcessorCount,
              options.rows, cublas.found() ? "cuBLAS found" : "NO libcublas FOUND");
  std::printf("    D     F    E  product                        routing");
  for (const hopper::TileModel& model : hopper::kTileModels)
    std::printf("  %3dx%d TFLOP/s ", model.rows, model.columns);
  std::printf("\n");
  for (const Shape& shape : options.shapes) {
    for (const Named& named : kProducts) {
      const std::string name = std::string(",") + named.name + ",";
      if (!options.products.empty() && options.products.find(name) == std::string::npos) continue;
      for (const bool zipf : {false, true}) {
        std::printf("%5ld %5ld %4ld  %-9s %-20s %-7s", shape.D, shape.F, shape.E, named.name, named.formula,
                    zipf ? "zipf" : "uniform");
        measure(options, shape, named, zipf, properties.multiProcessorCount, cublas);
        std::printf("\n");
      }
    }
  }
  return 0;
}
