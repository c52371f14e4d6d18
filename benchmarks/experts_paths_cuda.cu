// bench_experts_paths_cuda: the experts' network, forward and backward, on the kernels that the library takes, in every
// dtype, float32 also as TF32.
//
//   bench_experts_paths_cuda [--repeats N] [T,D,F,E,K,ELEMENTS]...      ELEMENTS: bfloat16, float16, float32, tf32
//
// First what tensor cores do by mma.sync alone, operands in registers: nothing on the portable path can be faster. And
// what they do beside additions, which take their time: splitting and rounding float32 operands and adding up sums are
// such instructions. Then a line for every shape: gated experts with rows gathered and weighted, whose slots are spread
// evenly. The path, which the line names, is the library's own choice; ANABRANCH_CUDA_PATH=portable has it
// otherwise. Random data, the L2 cache flushed before each call, the median of the repeats.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "anabranch/cuda.h"
#include "core/cuda/mma.cuh"

namespace anabranch::bench {

[[noreturn]] void fail(const char* what, const char* why) {
  std::printf("%s: %s\n", what, why);
  std::exit(1);
}

#define CHECK_CUDA(expression)                                                    \
  do {                                                                            \
    const cudaError_t failure_ = expression;                                      \
    if (failure_ != cudaSuccess) fail(#expression, cudaGetErrorString(failure_)); \
  } while (false)

void check(const char* what, const ab_status& status) {
  if (status.code != AB_OK) fail(what, status.message);
}

// Uniform in [-scale, scale), from a hash of the place.
template <class T>
__global__ void fill_random(T* values, int64_t count, uint32_t seed, float scale) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t hash = (static_cast<uint32_t>(i) ^ static_cast<uint32_t>(i >> 32) ^ seed) * 2654435761u;
    hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
    values[i] = from_float<T>((static_cast<float>(hash >> 8) * 0x1p-23f - 1.0f) * scale);
  }
}

// A tensor of the device.
class Tensor {
 public:
  Tensor(int32_t dtype, std::initializer_list<int64_t> shape) {
    view_.dtype = dtype;
    view_.rank = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), view_.shape);
    count_ = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    CHECK_CUDA(cudaMalloc(&view_.data, std::max<size_t>(bytes(), 16)));
  }
  ~Tensor() { cudaFree(view_.data); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const ab_tensor* view() const { return &view_; }
  size_t bytes() const {
    return static_cast<size_t>(count_) * (view_.dtype == AB_FLOAT32 || view_.dtype == AB_INT32 ? 4 : 2);
  }
  Tensor& randomize(uint32_t seed, float scale = 1.0f) {
    with_float_type(view_.dtype,
                    [&]<class T>(T) { fill_random<<<4096, 256>>>(static_cast<T*>(view_.data), count_, seed, scale); });
    CHECK_CUDA(cudaGetLastError());
    return *this;
  }
  Tensor& set(const std::vector<int32_t>& values) {
    CHECK_CUDA(cudaMemcpy(view_.data, values.data(), bytes(), cudaMemcpyHostToDevice));
    return *this;
  }

 private:
  ab_tensor view_{};
  int64_t count_ = 0;
};

// Microseconds of a call, the median of the repeats.
double time_of(int repeats, const std::function<void()>& call) {
  constexpr int kWarmUp = 3;
  const Tensor flush(AB_INT32, {int64_t{64} << 20});
  std::vector<cudaEvent_t> events(static_cast<size_t>(2 * repeats));
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = -kWarmUp; i < repeats; ++i) {
    CHECK_CUDA(cudaMemsetAsync(flush.view()->data, i & 0xff, flush.bytes()));
    if (i >= 0) CHECK_CUDA(cudaEventRecord(events[static_cast<size_t>(2 * i)]));
    call();
    if (i >= 0) CHECK_CUDA(cudaEventRecord(events[static_cast<size_t>(2 * i + 1)]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(static_cast<size_t>(repeats));
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[2 * i], events[2 * i + 1]));
    CHECK_CUDA(cudaEventDestroy(events[2 * i]));
    CHECK_CUDA(cudaEventDestroy(events[2 * i + 1]));
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)] * 1e3;
}

// --- the ceiling

constexpr int kFragments = 8;  // independent ones of a warp
constexpr int kRounds = 4096;

// kAdditions: of float32 numbers, for each product of fragments.
template <class Element, int kAdditions>
__global__ void __launch_bounds__(256) multiply_in_registers(float* out, uint32_t bits) {
  float c[kFragments][4] = {};
  float sums[kFragments * kAdditions + 1] = {};
  const float addend = float_from_bits(bits);
  const uint32_t a[4] = {bits, bits ^ 1u, bits ^ 2u, bits ^ 3u};
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      cuda::multiply_add_matrices<Element>(c[i], a, bits ^ static_cast<uint32_t>(i), bits);
#pragma unroll
      for (int j = 0; j < kAdditions; ++j) sums[i * kAdditions + j] += addend;
    }
  }
  float sum = 0;
  for (const float each : sums) sum += each;
  for (const auto& fragment : c) sum += fragment[0] + fragment[1] + fragment[2] + fragment[3];
  if (sum == 1.0f) out[0] = sum;  // it never is, but nobody knows
}

template <class Element, int kAdditions = 0>
double rate_in_registers(int multiprocessors) {
  const Tensor out(AB_FLOAT32, {1});
  const int blocks = 4 * multiprocessors;
  const double microseconds = time_of(10, [&] {
    multiply_in_registers<Element, kAdditions><<<blocks, 256>>>(static_cast<float*>(out.view()->data), 0x3c003c00u);
    CHECK_CUDA(cudaGetLastError());
  });
  const double depth = sizeof(Element) == 2 ? 16 : 8;
  return 2.0 * 16 * 8 * depth * kFragments * kRounds * 8 * blocks / microseconds * 1e-6;
}

// --- the network

struct Shape {
  long T, D, F, E, K;
  int32_t dtype;
  int32_t precision;
};

// Workspace of a call, once for all repeats.
template <class Args>
std::function<void()> prepared(const char* name, ab_status (*workspace_size)(const Args*, const ab_exec*, size_t*),
                               ab_status (*operation)(const Args*, const ab_exec*), const Args& args) {
  size_t bytes = 0;
  check(name, workspace_size(&args, nullptr, &bytes));
  const auto workspace =
      std::make_shared<Tensor>(AB_INT32, std::initializer_list<int64_t>{static_cast<int64_t>(bytes / 4 + 1)});
  return [=] {
    const ab_exec exec{sizeof(ab_exec), 0, nullptr, workspace->view()->data, bytes};
    check(name, operation(&args, &exec));
  };
}

// As the command line has it.
struct Elements {
  const char* name;
  int32_t dtype;
  int32_t precision;
};
constexpr Elements kElements[] = {{"bfloat16", AB_BFLOAT16, AB_PRECISION_HIGHEST},
                                  {"float16", AB_FLOAT16, AB_PRECISION_HIGHEST},
                                  {"float32", AB_FLOAT32, AB_PRECISION_HIGHEST},
                                  {"tf32", AB_FLOAT32, AB_PRECISION_TF32}};
const char* name_of(const Shape& s) {
  const auto* const found = std::find_if(std::begin(kElements), std::end(kElements), [&](const Elements& each) {
    return each.dtype == s.dtype && each.precision == s.precision;
  });
  return found->name;
}

void measure(const Shape& s, int repeats) {
  const int64_t R = s.T * s.K;
  std::vector<int32_t> sizes(static_cast<size_t>(s.E), 0);
  std::vector<int32_t> slots(static_cast<size_t>(R));
  std::mt19937 random(5);
  std::vector<std::vector<int32_t>> of_expert(sizes.size());
  std::vector<size_t> experts(sizes.size());
  std::iota(experts.begin(), experts.end(), size_t{0});
  for (int32_t t = 0; t < s.T; ++t) {
    for (int32_t k = 0; k < s.K; ++k) {  // K different ones
      std::swap(experts[static_cast<size_t>(k)],
                experts[static_cast<size_t>(k) + random() % (experts.size() - static_cast<size_t>(k))]);
      of_expert[experts[static_cast<size_t>(k)]].push_back(t * static_cast<int32_t>(s.K) + k);
    }
  }
  size_t row = 0;
  for (size_t e = 0; e < of_expert.size(); ++e) {
    sizes[e] = static_cast<int32_t>(of_expert[e].size());
    for (const int32_t slot : of_expert[e]) slots[row++] = slot;
  }
  Tensor group_sizes(AB_INT32, {s.E}), slot_of_row(AB_INT32, {R});
  group_sizes.set(sizes);
  slot_of_row.set(slots);
  Tensor x(s.dtype, {s.T, s.D}), w_in(s.dtype, {s.E, s.D, 2, s.F}), w_out(s.dtype, {s.E, s.F, s.D});
  Tensor weights(AB_FLOAT32, {s.T, s.K}), d_out(s.dtype, {s.T, s.D}), h(s.dtype, {R, 2, s.F}), y(s.dtype, {R, s.D});
  Tensor dx_rows(s.dtype, {R, s.D}), d_w_in(s.dtype, {s.E, s.D, 2, s.F}), d_w_out(s.dtype, {s.E, s.F, s.D});
  Tensor d_weights(AB_FLOAT32, {s.T, s.K}), dh(s.dtype, {R, 2, s.F});
  x.randomize(1);
  w_in.randomize(2, 0.05f);
  w_out.randomize(3, 0.05f);
  weights.randomize(4);
  d_out.randomize(5);
  h.randomize(6);

  ab_expert_ffn_forward_args forward{};
  forward.size = sizeof(forward);
  forward.activation = AB_SILU;
  forward.precision = s.precision;
  forward.topk = static_cast<int32_t>(s.K);
  forward.x = x.view();
  forward.slot_of_row = slot_of_row.view();
  forward.group_sizes = group_sizes.view();
  forward.w_in = w_in.view();
  forward.w_out = w_out.view();
  forward.weights = weights.view();
  forward.y = y.view();
  forward.h = h.view();
  ab_expert_ffn_backward_args backward{};
  backward.size = sizeof(backward);
  backward.activation = AB_SILU;
  backward.precision = s.precision;
  backward.topk = static_cast<int32_t>(s.K);
  backward.x = x.view();
  backward.slot_of_row = slot_of_row.view();
  backward.group_sizes = group_sizes.view();
  backward.w_in = w_in.view();
  backward.w_out = w_out.view();
  backward.weights = weights.view();
  backward.h = h.view();
  backward.d_out = d_out.view();
  backward.dh = dh.view();
  backward.dx_rows = dx_rows.view();
  backward.d_w_in = d_w_in.view();
  backward.d_w_out = d_w_out.view();
  backward.d_weights = d_weights.view();
  const double products = 6.0 * static_cast<double>(R) * static_cast<double>(s.D) * static_cast<double>(s.F);
  const double there =
      time_of(repeats, prepared("forward", ab_cuda_expert_ffn_forward_workspace, ab_cuda_expert_ffn_forward, forward));
  const double back = time_of(
      repeats, prepared("backward", ab_cuda_expert_ffn_backward_workspace, ab_cuda_expert_ffn_backward, backward));
  const char* path = nullptr;
  check("path", ab_cuda_experts_path(s.dtype, s.T, s.K, s.E, s.D, 2, s.F, 0, 0, 1, &path, nullptr));
  std::printf("%6ld %5ld %5ld %4ld %3ld  %-8s  %-8s   %10.1f us %6.1f   %10.1f us %6.1f\n", s.T, s.D, s.F, s.E, s.K,
              name_of(s), path, there, products / there * 1e-6, back, 2 * products / back * 1e-6);
  std::fflush(stdout);
}

bool parse_shape(const char* text, Shape* shape) {
  char name[16] = "";
  if (std::sscanf(text, "%ld,%ld,%ld,%ld,%ld,%15s", &shape->T, &shape->D, &shape->F, &shape->E, &shape->K, name) != 6) {
    return false;
  }
  for (const Elements& known : kElements) {
    if (std::strcmp(name, known.name) != 0) continue;
    shape->dtype = known.dtype;
    shape->precision = known.precision;
    return shape->T > 0 && shape->D > 0 && shape->F > 0 && shape->K > 0 && shape->E >= shape->K;
  }
  return false;
}

}  // namespace anabranch::bench

int main(int count, char** arguments) {
  using namespace anabranch;
  using namespace anabranch::bench;
  int repeats = 20;
  std::vector<Shape> shapes;
  for (int i = 1; i < count; ++i) {
    Shape shape{};
    if (std::strcmp(arguments[i], "--repeats") == 0 && i + 1 < count && std::atoi(arguments[i + 1]) > 0) {
      repeats = std::atoi(arguments[++i]);
    } else if (parse_shape(arguments[i], &shape)) {
      shapes.push_back(shape);
    } else {
      std::printf("got %s, expected --repeats N or T,D,F,E,K,ELEMENTS\n", arguments[i]);
      return 2;
    }
  }
  if (shapes.empty()) {
    for (const char* each : {"32768,2048,768,128,8,bfloat16", "32768,2048,768,128,8,float16",
                             "16384,2044,764,64,8,bfloat16", "16384,2047,765,64,8,bfloat16",
                             "4096,1024,512,32,4,float32", "16384,2048,768,64,8,float32", "4096,1024,512,32,4,tf32",
                             "16384,2048,768,64,8,tf32", "32768,4096,2048,1,1,bfloat16", "32768,4096,2048,1,1,float32",
                             "32768,4096,2048,1,1,tf32", "128,2048,768,128,8,bfloat16", "8,2048,768,128,8,bfloat16"}) {
      parse_shape(each, &shapes.emplace_back());
    }
  }
  char facts[8192];
  ab_cuda_describe(facts, sizeof(facts));
  std::printf("%s", facts);
  int multiprocessors = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const double tf32 = rate_in_registers<float>(multiprocessors);
  std::printf("mma.sync in registers, TFLOP/s: bfloat16 %.0f, float16 %.0f, TF32 %.0f, float32 by three of them %.0f\n",
              rate_in_registers<BFloat16>(multiprocessors), rate_in_registers<Float16>(multiprocessors), tf32,
              tf32 / 3);
  std::printf("TF32 beside one, two and three additions each: %.0f, %.0f, %.0f\n",
              rate_in_registers<float, 1>(multiprocessors), rate_in_registers<float, 2>(multiprocessors),
              rate_in_registers<float, 3>(multiprocessors));
  std::printf("     T     D     F    E   K  dtype     path          forward  TFLOP/s        backward  TFLOP/s\n");
  for (const Shape& shape : shapes) measure(shape, repeats);
  return 0;
}
