#include <algorithm>
#include <atomic>

#include "anabranch/dispatch.h"
#include "core/entry.h"
#include "dispatch/blocks.h"
#include "dispatch/check.h"

namespace anabranch {
namespace {

void expand_token(const RowIdMap& map, int64_t t) {
  const int64_t E = map.maps.K;
  const int32_t* ids = map.ids + t * (2 * E + 1);
  int32_t* rows = map.maps.row_of_slot + t * E;
  std::fill_n(rows, E, -1);
  const int64_t n = std::min<int64_t>(ids[2 * E], E);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t expert = ids[E + i];
    if (Maps::is_index(expert, E)) rows[expert] = map.row(ids[i], expert);
  }
  for (int64_t expert = 0; expert < E; ++expert) {
    if (rows[expert] < 0) continue;
    // If the map names a row twice, the last slot wins, whichever thread comes last.
    const int32_t slot = static_cast<int32_t>(t * E + expert);
    std::atomic_ref<int32_t> last(map.maps.slot_of_row[rows[expert]]);
    int32_t seen = last.load(std::memory_order_relaxed);
    while (seen < slot && !last.compare_exchange_weak(seen, slot, std::memory_order_relaxed)) {
    }
  }
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" ab_status ab_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  RowIdMap map;
  AB_RETURN_IF_ERROR(check_expand_row_id_map(args, &map));
  const Maps& maps = map.maps;
  std::fill_n(maps.slot_of_row, maps.R, -1);
  const Blocks blocks(maps.T, (3 * maps.K + 1) * static_cast<int64_t>(sizeof(int32_t)));
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int) {
    for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t) expand_token(map, t);
  });
  return ok();
}
