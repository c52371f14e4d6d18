// One routing step on a GPU as a CUDA graph: router forward, balance loss, plan, router backward; checked on the CPU.
//
//   g++ -std=c++20 router_graph.cc -I<include> -I<cuda>/include -L<lib> -lanabranch_cuda -lanabranch
//       -L<cuda>/lib64 -lcudart -o router_graph && ./router_graph
#include <anabranch/balance.h>
#include <anabranch/cuda.h>
#include <anabranch/dispatch.h>
#include <anabranch/router.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

namespace {

constexpr char kUsage[] =
    "usage: router_graph [TOKENS EXPERTS TOPK]\n"
    "Captures a routing step of float32 logits [TOKENS, EXPERTS] in a CUDA graph, replays it for two batches, and\n"
    "compares every result with the CPU's. Default: 4096 128 8. Status 0: they agree; 1: they differ, or an error.\n";

// Every call returns its status by value: a code and a message that names the argument.
void check(const ab_status& status) {
  if (status.code == AB_OK) return;
  std::fprintf(stderr, "anabranch: %s\n", status.message);
  std::exit(1);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Device memory, freed by the destructor.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// A contiguous array of float32 or int32 in host memory and in device memory, with one view of each.
template <class T>
class Array {
 public:
  Array(std::initializer_list<int64_t> shape) : Array(std::vector<int64_t>(shape)) {}

  std::vector<T>& host() { return host_; }
  const std::vector<T>& host() const { return host_; }
  // Both libraries accept this struct: only the pointer in the view differs.
  const ab_tensor* view(bool device) const { return device ? &device_view_ : &host_view_; }

  void upload(cudaStream_t stream) {
    check(cudaMemcpyAsync(memory_.data(), host_.data(), host_.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  }
  std::vector<T> download() const {
    std::vector<T> values(host_.size());
    check(cudaMemcpy(values.data(), memory_.data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  explicit Array(const std::vector<int64_t>& shape) : host_(count(shape)), memory_(count(shape) * sizeof(T)) {
    host_view_.data = host_.data();
    host_view_.dtype = std::is_same_v<T, float> ? AB_FLOAT32 : AB_INT32;
    host_view_.rank = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), host_view_.shape);
    device_view_ = host_view_;
    device_view_.data = memory_.data();
  }
  static size_t count(const std::vector<int64_t>& shape) {
    size_t product = 1;
    for (const int64_t n : shape) product *= static_cast<size_t>(n);
    return product;
  }

  std::vector<T> host_;
  DeviceMemory memory_;
  ab_tensor host_view_{};
  ab_tensor device_view_{};
};

// All inputs and outputs of the step. T tokens, E experts, K experts per token, R = T K rows.
struct Arrays {
  Arrays(int64_t T, int64_t E, int64_t K)
      : logits{T, E},
        d_weights{T, K},
        num_tokens{},
        weights{T, K},
        experts{T, K},
        tokens_per_expert{E},
        score_sum{E},
        lse{T},
        loss{},
        d_score_sum{E},
        offsets{E + 1},
        row_of_slot{T, K},
        slot_of_row{T * K},
        dropped{},
        d_logits{T, E} {}
  Array<float> logits, d_weights;  // d_weights replaces the gradient from the experts
  Array<int32_t> num_tokens;
  Array<float> weights;
  Array<int32_t> experts, tokens_per_expert;
  Array<float> score_sum, lse, loss, d_score_sum;
  Array<int32_t> offsets, row_of_slot, slot_of_row, dropped;
  Array<float> d_logits;
};

struct Step {
  ab_router_forward_args forward{};
  ab_load_balance_loss_args loss{};
  ab_plan_args plan{};
  ab_router_backward_args backward{};
};

// The arguments of the four operations, in host or device memory.
Step step_on(bool device, const Arrays& a, int32_t num_experts, int32_t topk) {
  Step step;
  step.forward.size = sizeof step.forward;
  step.forward.topk = topk;
  step.forward.score_function = AB_SOFTMAX;
  step.forward.normalize = 1;
  step.forward.scaling_factor = 1.0f;
  step.forward.logits = a.logits.view(device);
  step.forward.weights = a.weights.view(device);
  step.forward.experts = a.experts.view(device);
  step.forward.tokens_per_expert = a.tokens_per_expert.view(device);
  step.forward.score_sum = a.score_sum.view(device);
  step.forward.lse = a.lse.view(device);

  step.loss.size = sizeof step.loss;
  step.loss.topk = topk;
  step.loss.coeff = 0.01f;
  step.loss.score_sum = a.score_sum.view(device);
  step.loss.tokens_per_expert = a.tokens_per_expert.view(device);
  step.loss.num_tokens = a.num_tokens.view(device);
  step.loss.loss = a.loss.view(device);
  step.loss.d_score_sum = a.d_score_sum.view(device);

  step.plan.size = sizeof step.plan;
  step.plan.num_experts = num_experts;
  step.plan.experts = a.experts.view(device);
  step.plan.offsets = a.offsets.view(device);
  step.plan.row_of_slot = a.row_of_slot.view(device);
  step.plan.slot_of_row = a.slot_of_row.view(device);
  step.plan.dropped = a.dropped.view(device);

  // One pass for both gradients: through the weights, and through the loss's score_sum.
  step.backward.size = sizeof step.backward;
  step.backward.topk = topk;
  step.backward.score_function = AB_SOFTMAX;
  step.backward.normalize = 1;
  step.backward.scaling_factor = 1.0f;
  step.backward.logits = a.logits.view(device);
  step.backward.experts = a.experts.view(device);
  step.backward.lse = a.lse.view(device);
  step.backward.d_weights = a.d_weights.view(device);
  step.backward.d_score_sum = a.d_score_sum.view(device);
  step.backward.d_logits = a.d_logits.view(device);
  return step;
}

// Runs an operation of the CPU library with the workspace that it requests.
template <class Args>
void run_on_cpu(ab_status (*operation)(const Args*, const ab_exec*),
                ab_status (*workspace_size)(const Args*, const ab_exec*, size_t*), const Args& args) {
  ab_exec exec{sizeof(ab_exec), 0, nullptr, nullptr, 0};
  check(workspace_size(&args, &exec, &exec.workspace_size));
  size_t space = exec.workspace_size + 64;
  std::vector<char> memory(space);
  exec.workspace = memory.data();
  std::align(64, exec.workspace_size, exec.workspace, space);
  check(operation(&args, &exec));
}

void run_on_cpu(const Step& step) {
  run_on_cpu(ab_router_forward, ab_router_forward_workspace, step.forward);
  check(ab_load_balance_loss(&step.loss, nullptr));
  run_on_cpu(ab_plan, ab_plan_workspace, step.plan);
  run_on_cpu(ab_router_backward, ab_router_backward_workspace, step.backward);
}

// Whether the device's integers equal those of the CPU, and its floats differ only by rounding.
template <class T>
bool agrees(const char* name, const Array<T>& array) {
  const std::vector<T> got = array.download();
  double largest = 0;
  for (const T value : array.host()) largest = std::max(largest, std::abs(static_cast<double>(value)));
  const double bound = std::is_same_v<T, float> ? 1e-5 * largest + 1e-7 : 0.0;
  size_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(array.host()[i]));
    if (!(error <= bound)) ++wrong;  // a NaN is wrong
  }
  if (wrong > 0) std::fprintf(stderr, "%s: %zu of %zu elements differ from the CPU's\n", name, wrong, got.size());
  return wrong == 0;
}

int64_t number(const char* name, const char* text, int64_t max_value) {
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < 1 || value > max_value) {
    std::fprintf(stderr, "%s: got %s, expected an integer from 1 to %lld\n", name, text,
                 static_cast<long long>(max_value));
    std::exit(1);
  }
  return value;
}

// Returns the exit status.
int run(int64_t T, int64_t E, int64_t K) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "NO GPU FOUND: %s\n", cudaGetErrorString(error));
    return 1;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));

  // The caller owns all memory and allocates it once: arrays and workspaces.
  Arrays arrays(T, E, K);
  const Step step = step_on(true, arrays, static_cast<int32_t>(E), static_cast<int32_t>(K));
  size_t forward_bytes = 0;
  size_t plan_bytes = 0;
  check(ab_cuda_router_forward_workspace(&step.forward, nullptr, &forward_bytes));
  check(ab_cuda_plan_workspace(&step.plan, nullptr, &plan_bytes));
  const DeviceMemory workspace(std::max(forward_bytes, plan_bytes));  // the operations run in sequence and may share it

  // Calls only enqueue kernels on the stream, so the stream can be captured.
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const ab_exec exec{sizeof(ab_exec), 0, stream, workspace.data(), std::max(forward_bytes, plan_bytes)};
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  check(ab_cuda_router_forward(&step.forward, &exec));
  check(ab_cuda_load_balance_loss(&step.loss, &exec));
  check(ab_cuda_plan(&step.plan, &exec));
  check(ab_cuda_router_backward(&step.backward, &exec));
  check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replayable = nullptr;
  check(cudaGraphInstantiate(&replayable, graph, 0));
  size_t nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &nodes));
  std::printf("anabranch %s on %s: %lld tokens, %lld experts, %lld per token; a graph of %zu nodes\n", ab_version(),
              properties.name, static_cast<long long>(T), static_cast<long long>(E), static_cast<long long>(K), nodes);

  // Each replay of the graph reads the current values of its operands.
  arrays.num_tokens.host()[0] = static_cast<int32_t>(T);
  arrays.num_tokens.upload(stream);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  bool all_agree = true;
  for (int batch = 0; batch < 2; ++batch) {
    for (float& value : arrays.logits.host()) value = normal(random);
    for (float& value : arrays.d_weights.host()) value = normal(random);
    arrays.logits.upload(stream);
    arrays.d_weights.upload(stream);
    check(cudaGraphLaunch(replayable, stream));
    check(cudaStreamSynchronize(stream));

    run_on_cpu(step_on(false, arrays, static_cast<int32_t>(E), static_cast<int32_t>(K)));
    bool agree = true;
    const auto compare = [&agree](const char* name, auto& array) { agree = agrees(name, array) && agree; };
    compare("weights", arrays.weights);
    compare("experts", arrays.experts);
    compare("tokens_per_expert", arrays.tokens_per_expert);
    compare("score_sum", arrays.score_sum);
    compare("lse", arrays.lse);
    compare("loss", arrays.loss);
    compare("d_score_sum", arrays.d_score_sum);
    compare("offsets", arrays.offsets);
    compare("row_of_slot", arrays.row_of_slot);
    compare("slot_of_row", arrays.slot_of_row);
    compare("dropped", arrays.dropped);
    compare("d_logits", arrays.d_logits);
    std::printf("batch %d: token 0 goes to expert %d first, weight %.4f; loss %.6f; agrees with the CPU: %s\n", batch,
                arrays.experts.download()[0], arrays.weights.download()[0], arrays.loss.download()[0],
                agree ? "yes" : "no");
    all_agree = all_agree && agree;
  }

  // Measure the time per replay with a full queue.
  constexpr int kReplays = 200;
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(start, stream));
  for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(replayable, stream));
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, start, end));
  std::printf("%.1f microseconds per replay, mean of %d\n", 1e3 * milliseconds / kReplays, kReplays);

  check(cudaEventDestroy(start));
  check(cudaEventDestroy(end));
  check(cudaGraphExecDestroy(replayable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return all_agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && (std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0)) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (argc != 1 && argc != 4) {
    std::fprintf(stderr, "arguments: got %d, expected 0 or 3\n%s", argc - 1, kUsage);
    return 1;
  }
  const int64_t T = argc == 4 ? number("TOKENS", argv[1], 1 << 20) : 4096;
  const int64_t E = argc == 4 ? number("EXPERTS", argv[2], AB_CUDA_MAX_EXPERTS) : 128;
  const int64_t K = argc == 4 ? number("TOPK", argv[3], E) : 8;

  try {
    return run(T, E, K);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "no memory on the host for %lld tokens and %lld experts\n", static_cast<long long>(T),
                 static_cast<long long>(E));
    return 1;
  }
}
