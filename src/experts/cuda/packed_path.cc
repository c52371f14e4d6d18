#include "experts/cuda/packed_path.h"

#include <cstdlib>
#include <cstring>

#include "core/cuda/path.h"
#include "core/status.h"
#include "experts/hopper/packed_products.h"
#include "experts/portable/packed_products.h"

namespace anabranch::cuda {
namespace {

// Rows per expert, on average, for which Hopper's producer decodes, where few_rows does not. With more rows unpacking
// once takes less time than decoding in every tile of 256 rows. Where exactly is an estimate.
constexpr int64_t kMinRowsPerExpert = 10;
constexpr int64_t kMaxRowsPerExpert = 4096;

// On the sm80 path decoding in every tile of 128 rows takes 0.87 times as long as unpacking first with 512 rows per
// expert, and 1.06 times with 2048 (FP8 blocks, one H200).
constexpr int64_t kMaxRowsPerExpertOnSm80 = 1024;

enum class Use { by_rows, always, never };

ab_status read_variable(Use* use) {
  static const char* const kRequested = std::getenv("ANABRANCH_CUDA_PACKED");
  *use = Use::by_rows;
  if (kRequested == nullptr || kRequested[0] == '\0') return ok();
  if (std::strcmp(kRequested, "always") == 0) {
    *use = Use::always;
  } else if (std::strcmp(kRequested, "never") == 0) {
    *use = Use::never;
  } else {
    return error(AB_UNSUPPORTED, "ANABRANCH_CUDA_PACKED: got %s, expected always, never or nothing", kRequested);
  }
  return ok();
}

// few_rows: whether these kernels support the GEMM.
template <class Operation>
ab_status choose(const Operation& op, int64_t R, int64_t E, bool few_rows, const Device& device, PackedPath* path) {
  Use use;
  AB_RETURN_IF_ERROR(read_variable(&use));
  *path = few_rows ? PackedPath::few_rows : PackedPath::unpacked;
  if (use == Use::never) return ok();
  if (first_path(device).path == Path::portable) {
    const bool by_rows = !few_rows && R <= kMaxRowsPerExpertOnSm80 * E;
    if ((use == Use::always || by_rows) && portable::unsupported_reason(op) == nullptr) *path = PackedPath::portable;
    return ok();
  }
  const bool by_rows = !few_rows && kMinRowsPerExpert * E <= R && R <= kMaxRowsPerExpert * E;
  if ((use == Use::always || by_rows) && hopper::unsupported_reason(op) == nullptr) *path = PackedPath::hopper;
  return ok();
}

}  // namespace

ab_status choose_path(const PackedUp& up, const Device& device, PackedPath* path) {
  const bool few_rows = reads_packed(up.s.R, up.s.E, up.packed.N, up.packed.C, up.x.dtype);
  return choose(up, up.s.R, up.s.E, few_rows, device, path);
}

ab_status choose_path(const PackedIntermediateGradient& g, const Device& device, PackedPath* path) {
  return choose(g, g.s.R, g.s.E, false, device, path);
}

ab_status choose_path(const PackedRowsProduct& p, const Device& device, PackedPath* path) {
  const bool few_rows = p.transposed && reads_packed(p.R, p.E, p.packed.N, p.packed.C, p.dtype);
  return choose(p, p.R, p.E, few_rows, device, path);
}

}  // namespace anabranch::cuda
