#include "experts/cuda/path.h"

#include <cstdlib>
#include <cstring>

#include "core/status.h"

namespace anabranch::cuda {
namespace {

struct FirstPath {
  Path path;
  ab_status status;
};

FirstPath read_variable() {
  const char* wanted = std::getenv("ANABRANCH_CUDA_PATH");
  if (wanted == nullptr || wanted[0] == '\0') return {Path::hopper, ok()};
  for (const Path path : {Path::hopper, Path::portable, Path::plain}) {
    if (std::strcmp(wanted, name_of(path)) == 0) return {path, ok()};
  }
  return {Path::hopper,
          error(AB_UNSUPPORTED, "ANABRANCH_CUDA_PATH: got %s, expected hopper, portable, plain or nothing", wanted)};
}

const FirstPath& variable() {
  static const FirstPath read = read_variable();
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

Path first_path() { return variable().path; }

ab_status find_device_of_experts(const char* operation, Device* device) {
  AB_RETURN_IF_ERROR(variable().status);
  return find_device(operation, device);
}

PathChoice choose_path(const Device& device) {
  constexpr const char* kVariable = "ANABRANCH_CUDA_PATH names a later path";
  PathChoice choice{Path::hopper};
  if (first_path() > Path::hopper) {
    choice = {Path::portable, kVariable};
  } else if (!device.is_hopper()) {
    choice = {Path::portable, "its compute capability is not 9.0"};
  }
  if (first_path() > Path::portable) choice = {Path::plain, kVariable, kVariable};
  return choice;
}

}  // namespace anabranch::cuda
