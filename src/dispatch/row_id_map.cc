#include <algorithm>
#include <atomic>

#include "anabranch/dispatch.h"
#include "dispatch/maps.h"

namespace anabranch {
namespace {

struct RowIdMap {
  const int32_t* ids = nullptr;
  const int32_t* padding = nullptr;
  int64_t E = 0;
  Maps maps;
};

ab_status parse(const ab_expand_row_id_map_args* args, RowIdMap* op) {
  AB_RETURN_IF_ERROR(check_struct("ab_expand_row_id_map_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, -1, {"E"}, &op->maps));
  op->E = op->maps.K;
  AB_RETURN_IF_ERROR(
      check_tensor("row_id_map", args->row_id_map, kInt32, {{"T", op->maps.T}, {"2E+1", 2 * op->E + 1}}));
  AB_RETURN_IF_ERROR(check_optional("pad_offsets", args->pad_offsets, kInt32, {{"E", op->E}}));
  op->ids = data<const int32_t>(args->row_id_map);
  op->padding = data<const int32_t>(args->pad_offsets);
  return check_slot_of_row(args->slot_of_row, &op->maps);
}

void expand_token(const RowIdMap& op, int64_t t) {
  const int64_t E = op.E;
  const int32_t* ids = op.ids + t * (2 * E + 1);
  int32_t* rows = op.maps.row_of_slot + t * E;
  std::fill_n(rows, E, -1);
  const int64_t n = std::min<int64_t>(ids[2 * E], E);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t expert = ids[E + i];
    if (!Maps::is_index(expert, E)) continue;
    const int64_t row = int64_t{ids[i]} + (op.padding == nullptr ? 0 : op.padding[expert]);
    rows[expert] = ids[i] >= 0 && row >= 0 && row < op.maps.R ? static_cast<int32_t>(row) : -1;
  }
  for (int64_t expert = 0; expert < E; ++expert) {
    if (rows[expert] < 0) continue;
    // A map that names a row twice must not make the result depend on which thread comes last.
    const int32_t slot = static_cast<int32_t>(t * E + expert);
    std::atomic_ref<int32_t> last(op.maps.slot_of_row[rows[expert]]);
    int32_t seen = last.load(std::memory_order_relaxed);
    while (seen < slot && !last.compare_exchange_weak(seen, slot, std::memory_order_relaxed)) {
    }
  }
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" ab_status ab_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec) {
  RowIdMap op;
  AB_RETURN_IF_ERROR(parse(args, &op));
  std::fill_n(op.maps.slot_of_row, op.maps.R, -1);
  const Blocks blocks(op.maps.T, (3 * op.E + 1) * static_cast<int64_t>(sizeof(int32_t)));
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int) {
    for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t) expand_token(op, t);
  });
  return ok();
}
