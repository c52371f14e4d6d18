#include "core/cuda/path.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/status.h"

namespace anabranch::cuda {
namespace {

struct Variable {
  Path path;
  ab_status status;
};

Variable read_variable() {
  const char* requested = std::getenv("ANABRANCH_CUDA_PATH");
  if (requested == nullptr || requested[0] == '\0') return {Path::hopper, ok()};
  for (const Path path : {Path::hopper, Path::portable}) {
    if (std::strcmp(requested, name_of(path)) == 0) return {path, ok()};
  }
  return {Path::hopper,
          error(AB_UNSUPPORTED, "ANABRANCH_CUDA_PATH: got %s, expected hopper, portable or nothing", requested)};
}

const Variable& variable() {
  static const Variable read = read_variable();
  return read;
}

}  // namespace

const char* name_of(Path path) { return path == Path::hopper ? "hopper" : "portable"; }

PathChoice first_path(const Device& device) {
  if (variable().path == Path::portable) return {Path::portable, "ANABRANCH_CUDA_PATH is portable"};
  if (device.is_hopper()) return {Path::hopper};
  return {Path::portable, "the compute capability is not 9.0"};
}

ab_status check_path() { return variable().status; }

ab_status find_device_of_experts(const char* operation, Device* device) {
  AB_RETURN_IF_ERROR(check_path());
  return find_device(operation, device);
}

}  // namespace anabranch::cuda
