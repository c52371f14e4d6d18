#include <algorithm>
#include <cstring>

#include "anabranch/dispatch.h"
#include "core/entry.h"
#include "dispatch/blocks.h"
#include "dispatch/check.h"

namespace anabranch {
namespace {

// The first row of each chunk on the unsorted and on the sorted side, in the workspace. Chunk S is the tail, which
// keeps its position.
struct Starts {
  int64_t R;
  int64_t S;
  int64_t* unsorted;  // [S+2]
  int64_t* sorted;    // [S+1]

  static size_t bytes(const ChunkSort& sort) { return static_cast<size_t>(2 * sort.S + 3) * sizeof(int64_t); }
  Starts(const ChunkSort& sort, void* workspace)
      : R(sort.R), S(sort.S), unsorted(static_cast<int64_t*>(workspace)), sorted(unsorted + S + 2) {}

  int64_t size(int64_t chunk) const { return unsorted[chunk + 1] - unsorted[chunk]; }

  void place(const int32_t* sizes, const int32_t* order) const {
    constexpr int64_t kNotPlaced = -1;
    unsorted[0] = 0;
    for (int64_t chunk = 0; chunk < S; ++chunk) {
      unsorted[chunk + 1] = std::min(R, unsorted[chunk] + std::max(sizes[chunk], 0));
      sorted[chunk] = kNotPlaced;
    }
    unsorted[S + 1] = R;
    sorted[S] = unsorted[S];

    int64_t row = 0;
    const auto put = [&](int64_t chunk) {
      if (sorted[chunk] != kNotPlaced) return;
      sorted[chunk] = row;
      row += size(chunk);
    };
    for (int64_t i = 0; i < S; ++i) {
      if (Maps::is_index(order[i], S)) put(order[i]);
    }
    for (int64_t chunk = 0; chunk < S; ++chunk) put(chunk);
  }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  ChunkSort sort;
  AB_RETURN_IF_ERROR(check_sort_chunks(args, &sort));
  return report_workspace(Starts::bytes(sort), bytes);
}

ab_status ab_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  ChunkSort sort;
  AB_RETURN_IF_ERROR(check_sort_chunks(args, &sort));
  AB_RETURN_IF_ERROR(check_workspace(exec, Starts::bytes(sort)));
  const Starts starts(sort, exec->workspace);
  starts.place(sort.sizes, sort.order);

  const Blocks blocks(sort.R, 2 * sort.x.bytes);
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int) {
    int64_t row = blocks.begin(block);
    // Find the chunk that contains `row`: the last one that begins at or before it.
    int64_t chunk = std::upper_bound(starts.unsorted, starts.unsorted + sort.S + 1, row) - starts.unsorted - 1;
    for (const int64_t end = blocks.end(block); row < end; ++chunk) {
      const int64_t count = std::min(end, starts.unsorted[chunk + 1]) - row;
      const int64_t to = starts.sorted[chunk] + row - starts.unsorted[chunk];
      if (sort.x.bytes > 0) {
        std::memcpy(sort.out[sort.inverse ? row : to], sort.x[sort.inverse ? to : row],
                    static_cast<size_t>(count * sort.x.bytes));
      }
      for (int64_t i = 0; i < count && sort.row_id_map != nullptr; ++i) {
        sort.row_id_map[row + i] = static_cast<int32_t>(to + i);
      }
      row += count;
    }
  });
  return ok();
}

}  // extern "C"
