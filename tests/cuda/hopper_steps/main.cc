// hopper_steps: runs every step in its own process, so that a crash or a deadlock does not hide the other steps.
//
//   hopper_steps        runs all steps
//   hopper_steps N      runs only step N, in this process
#include <csignal>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "steps.h"

extern char** environ;

namespace anabranch::steps {
namespace {

constexpr Step kSteps[] = {
    {"tensor maps", tensor_maps},
    {"wgmma on panels", wgmma_panels},
    {"TMA loads", loads_of_boxes},
    {"stores of accumulators", stores_of_subtiles},
    {"gathered rows", gathered_rows},
    {"tiles of groups", tiles_of_groups},
    {"sequences of GEMMs", sequences_of_gemms},
};
constexpr int kMaxSeconds = 120;  // per step
constexpr int kCount = static_cast<int>(std::size(kSteps));

constexpr int kSkipped = 77;

bool has_hopper() {
  int count = 0;
  int major = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

// Runs a step in a new process of this program and returns its number of failures.
int run_in_process(char* program, int step) {
  std::string number = std::to_string(step);
  char* arguments[] = {program, number.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) != 0) return 1;
  int state = 0;
  for (int seconds = 0; waitpid(child, &state, WNOHANG) == 0; ++seconds) {
    if (seconds == kMaxSeconds) {
      std::printf("  STILL RUNNING after %d s: ended\n", kMaxSeconds);
      kill(child, SIGKILL);
    }
    sleep(1);
  }
  if (WIFEXITED(state)) return WEXITSTATUS(state);
  std::printf("  ended by signal %d\n", WTERMSIG(state));
  return 1;
}

int run_all(char* program) {
  std::string failed;
  for (int i = 0; i < kCount; ++i) {
    if (run_in_process(program, i) != 0) failed += std::string("  ") + std::to_string(i) + " " + kSteps[i].name + "\n";
  }
  std::printf("\n%s\n%s", failed.empty() ? "ALL STEPS PASSED" : "STEPS THAT FAILED:", failed.c_str());
  return failed.empty() ? 0 : 1;
}

int run_one(int step) {
  std::printf("== step %d: %s\n", step, kSteps[step].name);
  std::fflush(stdout);
  const int failures = kSteps[step].run();
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::printf("  at the end: %s\n", cudaGetErrorString(error));
  const bool passed = failures == 0 && error == cudaSuccess;
  std::printf("== step %d: %s\n", step, passed ? "PASS" : "FAIL");
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace anabranch::steps

int main(int count, char** arguments) {
  using namespace anabranch::steps;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!has_hopper()) {
    std::printf("NO HOPPER GPU FOUND: no step ran\n");
    return kSkipped;
  }
  if (count < 2) return run_all(arguments[0]);
  const int step = std::atoi(arguments[1]);
  if (step < 0 || step >= kCount) {
    std::printf("step: got %s, expected 0 to %d\n", arguments[1], kCount - 1);
    return 2;
  }
  return run_one(step);
}
