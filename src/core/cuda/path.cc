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
  const char* wanted = std::getenv("ANABRANCH_CUDA_PATH");
  if (wanted == nullptr || wanted[0] == '\0') return {Path::hopper, ok()};
  for (const Path path : {Path::hopper, Path::portable, Path::plain}) {
    if (std::strcmp(wanted, name_of(path)) == 0) return {path, ok()};
  }
  return {Path::hopper,
          error(AB_UNSUPPORTED, "ANABRANCH_CUDA_PATH: got %s, expected hopper, portable, plain or nothing", wanted)};
}

const Variable& variable() {
  static const Variable read = read_variable();
  return read;
}

}  // namespace

const char* name_of(Path path) {
  switch (path) {
    case Path::hopper: return "hopper";
    case Path::portable: return "portable";
    case Path::plain: break;
  }
  return "plain";
}

PathChoice first_path(const Device& device) {
  constexpr const char* kVariable = "ANABRANCH_CUDA_PATH names a later path";
  switch (variable().path) {
    case Path::hopper: break;
    case Path::portable: return {Path::portable, kVariable};
    case Path::plain: return {Path::plain, kVariable, kVariable};
  }
  if (device.is_hopper()) return {Path::hopper};
  return {Path::portable, "the compute capability is not 9.0"};
}

ab_status check_path() { return variable().status; }

ab_status find_device_of_experts(const char* operation, Device* device) {
  AB_RETURN_IF_ERROR(check_path());
  return find_device(operation, device);
}

}  // namespace anabranch::cuda
