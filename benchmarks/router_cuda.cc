// bench_router_cuda: compares the routers of several builds of libanabranch_cuda.so on this machine's GPU.
//
//   bench_router_cuda [--tokens T]... [--rows E,K]... [--dtype bfloat16|float32] [--repeats N] LIBRARY...
//
// For every routing, number of tokens and call, prints the median microseconds of each library and the ratio to the
// first library, and "bits differ" if its outputs differ from those of the first. Calls:
//
//   dense        probabilities and byte map
//   compact      weights, experts, counts, score_sum, lse
//   plain        weights, experts and, for softmax, lse: the training outputs of a layer without losses
//   balanced     compact with quantile balancing, for routings with a bias and without groups, if all libraries have it
//   d dense      backward from the cotangents of dense probabilities
//   d compact    backward from the cotangents of weights
//   d with loss  backward from the cotangents of weights and score_sum
//
// Calls run in graphs that rotate operands past the L2 cache. The libraries' replays are interleaved, so that drift of
// the clock affects all of them.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "anabranch/router.h"

namespace {

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

void check(cudaError_t failure, const char* what) {
  if (failure != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(failure));
}
void check(const ab_status& status) {
  if (status.code != AB_OK) fail(status.message);
}

struct Routing {
  int64_t E;
  int32_t K;
  int32_t score_function = AB_SOFTMAX;
  int32_t normalize = 1;
  bool bias = false;
  int32_t num_groups = 0;
  int32_t group_topk = 0;
};
const std::vector<Routing> kRoutings = {
    {8, 2},
    {64, 8, AB_SOFTMAX, 0},
    {128, 4},
    {128, 8, AB_SOFTMAX, 0},
    {256, 8, AB_SIGMOID, 1, true, 8, 4},
    {256, 16, AB_SOFTMAX, 0},
    {384, 8, AB_SIGMOID, 1, true},
    {512, 10, AB_SOFTMAX, 0},
    {512, 32, AB_SIGMOID, 1, true},
    // Scores without a bias, softmax with a bias, and the most expensive score function.
    {16, 1, AB_SIGMOID, 0},
    {64, 6, AB_SIGMOID, 1, true},
    {128, 8, AB_SIGMOID, 1},
    {256, 16, AB_SIGMOID, 1},
    {384, 8, AB_SIGMOID, 1},
    {128, 8, AB_SOFTMAX, 1, true},
    {256, 8, AB_SQRTSOFTPLUS, 1, true},
    // Shapes that select other kernels.
    {16, 4},
    {32, 4},
    {160, 8, AB_SIGMOID, 1, true},
    {2304, 36},
};

// The functions of one build.
struct Library {
  std::string path;
  decltype(&ab_router_forward) forward;
  decltype(&ab_router_forward_workspace) forward_workspace;
  decltype(&ab_router_backward) backward;
  bool balances;  // supports quantile balancing

  explicit Library(const char* file) : path(file) {
    void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fail(dlerror());
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, name));
      if (*function == nullptr) fail(path + " has no " + name);
    };
    find("ab_cuda_router_forward", &forward);
    find("ab_cuda_router_forward_workspace", &forward_workspace);
    find("ab_cuda_router_backward", &backward);
    balances = supports_balancing();
  }

 private:
  bool supports_balancing() const {
    void* const memory = const_cast<std::string*>(&path);  // any non-null address
    const ab_tensor logits{memory, AB_FLOAT32, 2, {1, 2}, nullptr};
    const ab_tensor bias{memory, AB_FLOAT32, 1, {2}, nullptr};
    const ab_tensor histogram{memory, AB_INT32, 2, {2, 1}, nullptr};
    ab_router_forward_args args{};
    args.size = sizeof(args);
    args.topk = 1;
    args.scaling_factor = 1.0f;
    args.logits = &logits;
    args.expert_bias = args.qb_bin_bounds = &bias;
    args.qb_histogram = &histogram;
    size_t bytes = 0;
    return forward_workspace(&args, nullptr, &bytes).code == AB_OK;  // a query reads no tensor data
  }
};

constexpr int64_t kBins = 1000;

// A device tensor.
class Tensor {
 public:
  Tensor(int32_t dtype, int64_t rows, int64_t columns = 0) : view_{nullptr, dtype, columns == 0 ? 1 : 2, {}, nullptr} {
    view_.shape[0] = rows;
    view_.shape[1] = columns;
    bytes_ = static_cast<size_t>(rows * std::max<int64_t>(columns, 1)) * size_of(dtype);
    check(cudaMalloc(&view_.data, bytes_), "cudaMalloc");
    check(cudaMemset(view_.data, 0, bytes_), "cudaMemset");
  }
  ~Tensor() { cudaFree(view_.data); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const ab_tensor* view() const { return &view_; }
  size_t bytes() const { return bytes_; }
  void fill(const std::vector<float>& pattern, float scale) {
    const size_t count = bytes_ / size_of(view_.dtype);
    std::vector<char> values(bytes_);
    for (size_t i = 0; i < count; ++i) {
      const float value = scale * pattern[(i + i / pattern.size() * 7919) % pattern.size()];
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (view_.dtype == AB_FLOAT32) {
        std::memcpy(values.data() + 4 * i, &bits, 4);
      } else {
        const auto high = static_cast<uint16_t>(bits >> 16);  // bfloat16
        std::memcpy(values.data() + 2 * i, &high, 2);
      }
    }
    check(cudaMemcpy(view_.data, values.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void clear() { check(cudaMemset(view_.data, 0xa5, bytes_), "cudaMemset"); }
  void append_to(std::vector<char>* all) const {
    const size_t begin = all->size();
    all->resize(begin + bytes_);
    check(cudaMemcpy(all->data() + begin, view_.data, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  static size_t size_of(int32_t dtype) { return dtype == AB_BOOL ? 1 : dtype == AB_BFLOAT16 ? 2 : 4; }

  ab_tensor view_;
  size_t bytes_;
};

// Operands and results of one routing.
struct Set {
  Tensor logits, bias, d_probs, d_weights, d_score_sum;
  Tensor weights, experts, counts, score_sum, lse, probs, map, d_logits, bounds, histogram;

  Set(const Routing& r, int64_t T, int32_t dtype, const std::vector<float>& normal)
      : logits(dtype, T, r.E),
        bias(AB_FLOAT32, r.E),
        d_probs(dtype, T, r.E),
        d_weights(AB_FLOAT32, T, r.K),
        d_score_sum(AB_FLOAT32, r.E),
        weights(AB_FLOAT32, T, r.K),
        experts(AB_INT32, T, r.K),
        counts(AB_INT32, r.E),
        score_sum(AB_FLOAT32, r.E),
        lse(AB_FLOAT32, T),
        probs(dtype, T, r.E),
        map(AB_BOOL, T, r.E),
        d_logits(dtype, T, r.E),
        bounds(AB_FLOAT32, 2),
        histogram(AB_INT32, r.E, kBins) {
    bounds.fill({-1.0f, 1.0f}, 1.0f);
    logits.fill(normal, 1.0f);
    bias.fill(normal, 0.01f);
    d_probs.fill(normal, 1.0f);
    d_weights.fill(normal, 1.0f);
    d_score_sum.fill(normal, 0.01f);
  }
  std::vector<Tensor*> outputs() {
    return {&weights, &experts, &counts, &score_sum, &lse, &probs, &map, &histogram, &d_logits};
  }
};

const char* const kCalls[] = {"dense", "compact", "plain", "balanced", "d dense", "d compact", "d with loss"};

void call(const Library& library, const std::string& name, const Routing& r, Set& set, ab_exec exec) {
  if (name[0] != 'd' || name == "dense") {
    ab_router_forward_args args{};
    args.size = sizeof(args);
    args.topk = r.K;
    args.score_function = r.score_function;
    args.normalize = r.normalize;
    args.num_groups = r.num_groups;
    args.group_topk = r.group_topk;
    args.scaling_factor = 1.0f;
    args.logits = set.logits.view();
    if (r.bias) args.expert_bias = set.bias.view();
    if (name == "dense") {
      args.probs = set.probs.view();
      args.routing_map = set.map.view();
    } else {
      args.weights = set.weights.view();
      args.experts = set.experts.view();
      if (name != "plain") args.tokens_per_expert = set.counts.view();
      if (name != "plain") args.score_sum = set.score_sum.view();
      if (name != "plain" || r.score_function == AB_SOFTMAX) args.lse = set.lse.view();
    }
    if (name == "balanced") {
      args.qb_bin_bounds = set.bounds.view();
      args.qb_histogram = set.histogram.view();
    }
    size_t bytes = 0;
    check(library.forward_workspace(&args, nullptr, &bytes));
    if (bytes > exec.workspace_size) fail("the workspace is too small");
    check(library.forward(&args, &exec));
    return;
  }
  ab_router_backward_args args{};
  args.size = sizeof(args);
  args.topk = r.K;
  args.score_function = r.score_function;
  args.normalize = r.normalize;
  args.scaling_factor = 1.0f;
  args.logits = set.logits.view();
  args.experts = set.experts.view();
  args.d_logits = set.d_logits.view();
  if (r.score_function == AB_SOFTMAX) args.lse = set.lse.view();
  (name == "d dense" ? args.d_probs : args.d_weights) = name == "d dense" ? set.d_probs.view() : set.d_weights.view();
  if (name == "d with loss") args.d_score_sum = set.d_score_sum.view();
  check(library.backward(&args, &exec));
}

// Records a graph of `calls` calls that rotates through the sets.
cudaGraphExec_t record(const Library& library, const std::string& name, const Routing& r,
                       std::vector<std::unique_ptr<Set>>& sets, int calls, const ab_exec& exec) {
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  cudaGraph_t graph;
  cudaGraphExec_t result;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < calls; ++i) call(library, name, r, *sets[static_cast<size_t>(i) % sets.size()], exec);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&result, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return result;
}

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  std::vector<int64_t> tokens;
  std::vector<std::pair<int64_t, int32_t>> rows;
  int32_t dtype = AB_BFLOAT16;
  int repeats = 30;
  std::vector<const char*> libraries;

  Options(int count, char** words) {
    for (int i = 1; i < count; ++i) {
      const std::string word = words[i];
      if (word.rfind("--", 0) != 0) {
        libraries.push_back(words[i]);
        continue;
      }
      if (i + 1 == count) fail(word + ": got nothing, expected a value");
      const char* value = words[++i];
      long long E;
      int K;
      if (word == "--tokens" && std::atoll(value) > 0) {
        tokens.push_back(std::atoll(value));
      } else if (word == "--repeats" && std::atoi(value) > 0) {
        repeats = std::atoi(value);
      } else if (word == "--rows" && std::sscanf(value, "%lld,%d", &E, &K) == 2) {
        rows.emplace_back(E, K);
      } else if (word == "--dtype" && (!std::strcmp(value, "bfloat16") || !std::strcmp(value, "float32"))) {
        dtype = value[0] == 'f' ? AB_FLOAT32 : AB_BFLOAT16;
      } else {
        fail("got " + word + " " + value + ", expected --tokens T, --rows E,K, --dtype bfloat16|float32, --repeats N");
      }
    }
    if (tokens.empty()) tokens = {65536, 8192, 4096, 256};
    if (libraries.empty()) fail("got no library, expected the path of at least one");
  }
  bool selects(const Routing& r) const {
    return rows.empty() || std::find(rows.begin(), rows.end(), std::pair(r.E, r.K)) != rows.end();
  }
};

void compare(const Options& options, const std::vector<Library>& libraries, const Routing& r, int64_t T,
             const std::vector<float>& normal, const ab_exec& exec) {
  constexpr size_t kCacheBytes = size_t{120} << 20;
  constexpr size_t kMaxSets = 24;
  constexpr int kMinCalls = 24;
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  std::vector<std::unique_ptr<Set>> sets;
  sets.push_back(std::make_unique<Set>(r, T, options.dtype, normal));
  while (sets.size() * sets[0]->logits.bytes() < kCacheBytes && sets.size() < kMaxSets) {
    sets.push_back(std::make_unique<Set>(r, T, options.dtype, normal));
  }
  const int calls = std::max(kMinCalls, static_cast<int>(sets.size()));
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (auto& set : sets) call(libraries[0], "compact", r, *set, exec);  // writes the inputs of the backward pass
  for (const char* name : kCalls) {
    const bool balances = std::all_of(libraries.begin(), libraries.end(), [](const Library& l) { return l.balances; });
    if (!std::strcmp(name, "balanced") && (!r.bias || r.num_groups > 0 || !balances)) continue;
    std::vector<cudaGraphExec_t> graphs;
    std::vector<bool> same;
    std::vector<char> expected;
    for (const Library& library : libraries) {
      Set& set = *sets[0];
      const bool backward = name[0] == 'd' && name[1] == ' ';
      for (Tensor* output : set.outputs()) {
        if (!backward || output == &set.d_logits) output->clear();
      }
      call(library, name, r, set, exec);
      check(cudaStreamSynchronize(stream), name);
      std::vector<char> got;
      for (Tensor* output : set.outputs()) output->append_to(&got);
      if (expected.empty()) expected = got;
      same.push_back(got == expected);
      call(libraries[0], "compact", r, set, exec);
      graphs.push_back(record(library, name, r, sets, calls, exec));
    }
    std::vector<std::vector<float>> times(libraries.size());
    for (int repeat = -3; repeat < options.repeats; ++repeat) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        check(cudaEventRecord(begin, stream), "cudaEventRecord");
        check(cudaGraphLaunch(graphs[i], stream), "cudaGraphLaunch");
        check(cudaEventRecord(end, stream), "cudaEventRecord");
        check(cudaEventSynchronize(end), name);
        float ms = 0.0f;
        check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        if (repeat >= 0) times[i].push_back(1e3f * ms / static_cast<float>(calls));
      }
    }
    std::printf("T %lld E %lld K %d score %d normalize %d bias %d groups %d/%d %s:", static_cast<long long>(T),
                static_cast<long long>(r.E), r.K, r.score_function, r.normalize, r.bias, r.num_groups, r.group_topk,
                name);
    for (size_t i = 0; i < times.size(); ++i) {
      std::printf("  %.2f us (%.3f)%s", static_cast<double>(median(times[i])),
                  static_cast<double>(median(times[i]) / median(times[0])), same[i] ? "" : " bits differ");
      cudaGraphExecDestroy(graphs[i]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace

int main(int count, char** words) {
  const Options options(count, words);
  std::vector<Library> libraries;
  for (const char* file : options.libraries) libraries.emplace_back(file);
  std::mt19937 random(1);
  std::normal_distribution<float> distribution;
  std::vector<float> normal((size_t{1} << 20) + 3);
  for (float& value : normal) value = distribution(random);
  ab_exec exec{};
  exec.size = sizeof(exec);
  exec.workspace_size = size_t{64} << 20;
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  exec.stream = stream;
  check(cudaMalloc(&exec.workspace, exec.workspace_size), "cudaMalloc");
  for (const Library& library : libraries) std::printf("%s\n", library.path.c_str());
  for (const int64_t T : options.tokens) {
    for (const Routing& r : kRoutings) {
      if (options.selects(r)) compare(options, libraries, r, T, normal, exec);
    }
  }
  return 0;
}
