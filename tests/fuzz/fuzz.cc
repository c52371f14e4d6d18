// Fuzzer of the C interface. Makes random valid and invalid calls of the CPU library (under AddressSanitizer and
// UBSan), or of the CUDA code on the emulated GPU of tests/emulation, compared with the CPU library.
//
// Checks for every call:
// - It accesses nothing outside tensors and workspace, has no undefined behaviour (sanitizers or guard zones), and does
//   not hang.
// - A valid call succeeds. A second run with other garbage in outputs and workspace, and another number of threads,
//   gives the same bits.
// - A refused call writes nothing, and its message starts with the name of an argument.
// - The workspace query returns the same status as the call. Inputs are never written.
// - Both backends refuse the same calls with the same messages, and their results are close.
//
// The seed determines a case: `fuzz --seed N --cases 1` repeats it.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size)
#define ASAN_UNPOISON_MEMORY_REGION(begin, size)
#endif
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string_view>

#include "call.h"
#include "compare.h"
#if defined(ANABRANCH_FUZZ_EMULATED)
#include "emulator.h"
#endif

namespace anabranch::fuzz {
namespace {

constexpr size_t kMaxWorkspace = size_t{1} << 28;        // calls that need more are skipped
constexpr unsigned kMaxSeconds = kEmulated ? 600 : 120;  // per case; a longer case counts as a hang

uint64_t current_seed = 0;
const Call* current_call = nullptr;

void report() {
  std::fprintf(stderr, "fuzz: seed %llu: %s\n", static_cast<unsigned long long>(current_seed),
               current_call == nullptr ? "" : current_call->text().c_str());
  std::fprintf(stderr, "fuzz: to repeat: fuzz --seed %llu --cases 1\n", static_cast<unsigned long long>(current_seed));
}

[[noreturn]] void fail(const char* what, const char* detail) {
  std::fprintf(stderr, "fuzz: %s: %s\n", what, detail);
  report();
  std::_Exit(1);
}

struct Tally {
  int64_t calls = 0;  // calls of C functions
  int64_t served = 0;
  int64_t refused = 0;
  int64_t compared = 0;  // calls compared with the other backend
};

// Returns a workspace of exactly the requested size, one at a time. The memory around it is poisoned for
// AddressSanitizer or filled as a guard zone. The memory is reused, because allocating it per call would take longer
// than most calls.
constexpr size_t kMargin = 64;
constexpr char kPattern = 0x5a;
size_t workspace_bytes = 0;
char* memory = nullptr;

void* take_workspace(size_t bytes, uint64_t garbage) {
  static size_t size = 0;
  workspace_bytes = bytes;
  if (bytes == 0) return nullptr;
  if (bytes + 2 * kMargin > size) {
    std::free(memory);
    size = bytes + 2 * kMargin;
    void* aligned = nullptr;
    if (posix_memalign(&aligned, kMargin, size) != 0) fail("harness", "out of memory for a workspace");
    memory = static_cast<char*>(aligned);
  }
  ASAN_UNPOISON_MEMORY_REGION(memory, size);
  std::fill_n(memory, kMargin, kPattern);
  std::fill_n(memory + kMargin + bytes, kMargin, kPattern);
  ASAN_POISON_MEMORY_REGION(memory, size);
  ASAN_UNPOISON_MEMORY_REGION(memory + kMargin, bytes);
  std::memset(memory + kMargin, static_cast<int>(garbage & 0xff), bytes);
  return memory + kMargin;
}

bool is_workspace_intact() {
#if !defined(__SANITIZE_ADDRESS__)
  for (size_t i = 0; i < kMargin && workspace_bytes > 0; ++i) {
    if (memory[i] != kPattern || memory[kMargin + workspace_bytes + i] != kPattern) return false;
  }
#endif
  return true;
}

// Chooses the thread order and copy times of the emulated GPU. No result may depend on them.
void choose_order([[maybe_unused]] Random& random) {
#if defined(ANABRANCH_FUZZ_EMULATED)
  using emulation::Order;
  emulation::set_options(
      {random.one_of({Order::forward, Order::backward, Order::shuffled, Order::warps_forward, Order::warps_backward}),
       random.one_of({emulation::Copies::early, emulation::Copies::late})});
#endif
}

// An ab_exec in memory of its claimed size.
class Exec {
 public:
  Exec(int32_t threads, size_t bytes, uint64_t garbage)
      : exec_{sizeof(ab_exec), threads, nullptr, take_workspace(bytes, garbage), bytes} {}
  ab_exec& fields() { return exec_; }
  const ab_exec* get() {
    bytes_.assign(std::clamp(exec_.size, sizeof(size_t), size_t{4096}), 0);
    std::memcpy(bytes_.data(), &exec_, std::min(bytes_.size(), sizeof(exec_)));
    return reinterpret_cast<const ab_exec*>(bytes_.data());
  }

 private:
  ab_exec exec_;
  std::vector<char> bytes_;
};

class Case {
 public:
  Case(uint64_t seed, std::vector<Tally>* tallies) : random_(seed) {
    const size_t which = random_.bits() % kOperations.size();
    tally_ = &(*tallies)[which];
    kOperations[which].make(kOperations[which], random_, &call_);
    mutate(random_, &call_);
    call_.allocate(random_);
    args_ = call_.args();
    current_call = &call_;
  }
  ~Case() { current_call = nullptr; }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  void check() {
    const int32_t threads = any_threads();
    size_t needed = 0;
    ab_status query_status = query(threads, &needed);
    compare_refusals(query_status);
    if (query_status.code != AB_OK) {
      expect_refusal(query_status);
      Exec exec(threads, 0, 0);
      const ab_status status = run(&exec, random_.bits());
      expect_refusal(status);
      if (status.code != query_status.code) fail("the call and its query return different statuses", status.message);
      return;
    }
    if (needed > kMaxWorkspace || random_.chance(0.1)) return check_bad_exec(threads, needed);
    Exec exec(threads, needed, random_.bits());
    const ab_status status = run(&exec, random_.bits());
    if (status.code != AB_OK) return expect_refusal(status);
    check_served(threads, needed);
  }

 private:
  // Mostly few threads, because workspaces grow with their number.
  int32_t any_threads() { return static_cast<int32_t>(random_.between(0, random_.chance(0.1) ? 9 : 3)); }

  ab_status query(int32_t threads, size_t* needed) {
    if (call_.operation->query == nullptr) return {AB_OK, ""};
    Exec exec(threads, 0, 0);
    const ab_status status = call_.operation->query(args_.data(), exec.get(), needed);
    ++tally_->calls;
    return status;
  }

  // Runs the call with garbage in the outputs. A refused call must leave the garbage unchanged.
  ab_status run(Exec* exec, uint64_t garbage) {
    call_.reset(garbage);
    choose_order(random_);
    const ab_status status = call_.operation->run(args_.data(), exec->get());
    ++tally_->calls;
    if (const Operand* operand = call_.overrun()) fail("written outside a tensor", operand->name.c_str());
    if (!is_workspace_intact()) fail("written outside the workspace", "");
    ++(status.code == AB_OK ? tally_->served : tally_->refused);
    if (const Operand* input = call_.changed_input()) fail("an input was written", input->name.c_str());
    if (status.code != AB_OK) {
      if (const Operand* output = call_.written_output(garbage)) {
        fail("a refused call wrote an output", output->name.c_str());
      }
    }
    return status;
  }

  void check_served(int32_t threads, size_t needed) {
    for (const Operand& operand : call_.operands) {
      if (operand.is_given() && operand.view.data == nullptr && has_elements(operand.view)) {
        fail("a tensor without memory was accepted", operand.name.c_str());
      }
    }
    const auto first = call_.results();
    const int32_t other = threads == 1 ? 2 : 1;
    size_t other_needed = 0;
    if (query(other, &other_needed).code != AB_OK) fail("the query depends on the number of threads", "");
    Exec exec(other, call_.operation->query == nullptr ? needed : other_needed, random_.bits());
    const ab_status status = run(&exec, random_.bits());
    if (status.code != AB_OK) fail("refused the second time", status.message);
    if (!are_same(call_, first, call_.results())) fail("the second call gave other bits", differing(first).c_str());
    compare_results(first);
  }

  // Both backends must refuse the same calls, except calls that one of them does not support.
  void compare_refusals(const ab_status& query_status) {
    if (call_.operation->query == nullptr || call_.operation->other_query == nullptr) return;
    size_t bytes = 0;
    Exec exec(1, 0, 0);
    const ab_status other = call_.operation->other_query(args_.data(), exec.get(), &bytes);
    if (query_status.code == AB_UNSUPPORTED || other.code == AB_UNSUPPORTED) return;
    if (query_status.code != other.code || std::string_view(query_status.message) != other.message) {
      fail("the other backend returns another status",
           (std::string(query_status.message) + "; " + other.message).c_str());
    }
  }

  void compare_results(const Results& results) {
    const Operation& operation = *call_.operation;
    if (operation.other_run == nullptr) return;
    size_t needed = 0;
    Exec query_exec(1, 0, 0);
    if (operation.other_query != nullptr &&
        operation.other_query(args_.data(), query_exec.get(), &needed).code != AB_OK) {
      fail("the other backend refuses it", "");
    }
    if (needed > kMaxWorkspace) return;
    Exec exec(1, needed, random_.bits());
    call_.reset(random_.bits());
    const ab_status status = operation.other_run(args_.data(), exec.get());
    if (status.code != AB_OK) fail("the other backend refuses it", status.message);
    ++tally_->compared;
    const std::string differs = difference(call_, results, call_.results());
    if (!differs.empty()) fail("the backends differ", differs.c_str());
  }

  std::string differing(const std::vector<std::vector<char>>& first) const {
    const auto second = call_.results();
    size_t i = 0;
    for (const Operand& operand : call_.operands) {
      if (!operand.is_compared()) continue;
      const auto [a, b] = std::mismatch(first[i].begin(), first[i].end(), second[i].begin());
      if (a != first[i].end()) {
        const auto byte = a - first[i].begin();
        uint32_t words[2] = {};
        for (int side = 0; side < 2; ++side) {
          const std::vector<char>& bytes = side == 0 ? first[i] : second[i];
          const size_t begin = static_cast<size_t>(byte) / sizeof(uint32_t) * sizeof(uint32_t);
          std::memcpy(&words[side], bytes.data() + begin, std::min(sizeof(uint32_t), bytes.size() - begin));
        }
        char where[64];
        std::snprintf(where, sizeof(where), ", byte %td: %08x, then %08x", byte, words[0], words[1]);
        return operand.name + where;
      }
      ++i;
    }
    return "";
  }

  // Passes a workspace that is too small, null or unaligned, a bad struct size, or a bad number of threads.
  void check_bad_exec(int32_t threads, size_t needed) {
    Exec exec(threads, 128, 0);
    const bool lacks = needed > 0;
    bool invalid = true;
    switch (random_.between(0, 5)) {
      case 0: {
        const size_t size = any_struct_size(random_, sizeof(ab_exec));
        exec.fields().size = size;
        const bool is_larger = size > sizeof(ab_exec) && size <= 4096 && size % 8 == 0;
        invalid = (size != sizeof(ab_exec) && !is_larger) || needed > 128;
        break;
      }
      case 1: exec.fields().num_threads = random_.one_of<int32_t>({-1, -5, 4097, 1 << 30, INT32_MAX, INT32_MIN}); break;
      case 2:
        exec.fields().workspace = nullptr;
        exec.fields().workspace_size = needed;
        invalid = lacks;
        break;
      case 3:
        exec.fields().workspace = static_cast<char*>(exec.fields().workspace) + 8;
        exec.fields().workspace_size = needed;
        invalid = lacks;
        break;
      default: exec.fields().workspace_size = std::min<size_t>(needed, 128) - (lacks ? 1 : 0); invalid = lacks;
    }
    const ab_status status = run(&exec, random_.bits());
    if (status.code != AB_OK) return expect_refusal(status, invalid);
    if (invalid) fail("an invalid ab_exec was accepted", "");
  }

  void expect_refusal(const ab_status& status, bool exec_is_invalid = false) {
    if (!call_.mutated && !exec_is_invalid) fail("a valid call was refused", status.message);
    if (status.code != AB_INVALID_ARGUMENT && status.code != AB_UNSUPPORTED) fail("failed", status.message);
    const std::string_view message(status.message);
    const std::string_view name = message.substr(0, message.find(": got "));
    if (!is_argument(name)) fail("the message names no argument", status.message);
  }

  bool is_argument(std::string_view name) const {
    for (const char* other : {"workspace", "exec", "ab_exec", call_.operation->args_name}) {
      if (name == other) return true;
    }
    const auto named = [&](const auto& pair) { return name == pair.first; };
    return std::any_of(call_.operands.begin(), call_.operands.end(),
                       [&](const Operand& operand) { return name == operand.name; }) ||
           std::any_of(call_.options.begin(), call_.options.end(), named) ||
           std::any_of(call_.numbers.begin(), call_.numbers.end(), named) || is_missing_argument(name);
  }

  // Whether the name may be that of an argument that this call does not pass.
  static bool is_missing_argument(std::string_view name) {
    return !name.empty() &&
           std::all_of(name.begin(), name.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
  }

  Random random_;
  Call call_;
  Tally* tally_;
  std::vector<char> args_;
};

struct Settings {
  uint64_t seed = static_cast<uint64_t>(std::time(nullptr));
  double seconds = 10;
  int64_t cases = INT64_MAX;
  std::vector<uint64_t> first;  // seeds to run before all others
};

// Reads one seed per line. Text after the seed is a comment.
std::vector<uint64_t> seeds_of(const char* path) {
  std::ifstream file(path);
  if (!file) {
    std::fprintf(stderr, "fuzz: --seeds: got %s, expected a readable file\n", path);
    std::exit(2);
  }
  std::vector<uint64_t> seeds;
  for (std::string line; std::getline(file, line);) seeds.push_back(std::strtoull(line.c_str(), nullptr, 10));
  return seeds;
}

Settings parse(int argc, char** argv) {
  Settings settings;
  bool has_seconds = false;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name(argv[i]);
    if (name == "--seed") {
      settings.seed = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (name == "--seeds") {
      settings.first = seeds_of(argv[i + 1]);
    } else if (name == "--seconds") {
      settings.seconds = std::strtod(argv[i + 1], nullptr);
      has_seconds = true;
    } else if (name == "--cases") {
      settings.cases = std::strtoll(argv[i + 1], nullptr, 10);
      if (!has_seconds) settings.seconds = 1e9;
    } else {
      argc = 0;
    }
  }
  if (argc % 2 == 0) {
    std::fprintf(stderr, "usage: fuzz [--seed N] [--seconds N] [--cases N] [--seeds FILE]\n");
    std::exit(2);
  }
  return settings;
}

int run(const Settings& settings) {
  std::vector<Tally> tallies(kOperations.size());
  std::printf("fuzz: seeds from %llu on\n", static_cast<unsigned long long>(settings.seed));
  std::fflush(stdout);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto start = now();
  const auto check = [&](uint64_t seed) {
    current_seed = seed;
    alarm(kMaxSeconds);
    Case(seed, &tallies).check();
  };
  for (const uint64_t seed : settings.first) check(seed);
  int64_t cases = 0;
  while (cases < settings.cases && std::chrono::duration<double>(now() - start).count() < settings.seconds) {
    check(settings.seed + static_cast<uint64_t>(cases++));
  }
  alarm(0);
  Tally all;
  const auto row = [](const char* name, const Tally& of) {
    std::printf("%-24s %10lld %10lld %10lld %10lld\n", name, static_cast<long long>(of.calls),
                static_cast<long long>(of.served), static_cast<long long>(of.refused),
                static_cast<long long>(of.compared));
  };
  std::printf("%-24s %10s %10s %10s %10s\n", "operation", "C calls", "served", "refused", "compared");
  for (size_t i = 0; i < tallies.size(); ++i) {
    const Tally& tally = tallies[i];
    row(kOperations[i].name, tally);
    all.calls += tally.calls;
    all.served += tally.served;
    all.refused += tally.refused;
    all.compared += tally.compared;
  }
  row("all", all);
  std::printf("fuzz: %lld cases, seeds %llu to %llu, %zu seeds before them, no finding\n",
              static_cast<long long>(cases), static_cast<unsigned long long>(settings.seed),
              static_cast<unsigned long long>(current_seed), settings.first.size());
  return 0;
}

}  // namespace
}  // namespace anabranch::fuzz

// oneDNN's JIT code for OpenMP threads is freed only when the process ends, so leak detection is off.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

int main(int argc, char** argv) {
  using namespace anabranch::fuzz;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(report);
#endif
  std::signal(SIGALRM, [](int) { fail("hang", "a case took too long"); });
  return run(parse(argc, argv));
}
