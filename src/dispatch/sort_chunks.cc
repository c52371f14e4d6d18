#include <algorithm>
#include <cstring>

#include "anabranch/dispatch.h"
#include "dispatch/elements.h"
#include "dispatch/maps.h"

namespace anabranch {
namespace {

struct ChunkSort {
  int64_t R = 0;
  int64_t S = 0;
  // workspace: where each chunk begins on the unsorted and on the sorted side; chunk S is the rest, which stays
  int64_t* unsorted = nullptr;  // [S+2]
  int64_t* sorted = nullptr;    // [S+1]

  size_t workspace_bytes() const { return static_cast<size_t>(2 * S + 3) * sizeof(int64_t); }
  void lay_out(void* workspace) {
    unsorted = static_cast<int64_t*>(workspace);
    sorted = unsorted + S + 2;
  }

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

ab_status parse(const ab_sort_chunks_args* args, ChunkSort* sort) {
  AB_RETURN_IF_ERROR(check_struct("ab_sort_chunks_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  if (args->inverse != 0 && args->inverse != 1) return AB_INVALID("inverse: got %d, expected 0 or 1", args->inverse);
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kAnyDtype, {{"R"}, {"D"}}));
  sort->R = args->x->shape[0];
  AB_RETURN_IF_ERROR(check_num_rows("x", sort->R));
  AB_RETURN_IF_ERROR(check_tensor("split_sizes", args->split_sizes, kInt32, {{"S"}}));
  sort->S = args->split_sizes->shape[0];
  AB_RETURN_IF_ERROR(check_tensor("sorted_indices", args->sorted_indices, kInt32, {{"S", sort->S}}));
  AB_RETURN_IF_ERROR(check_tensor("out", args->out, 1u << args->x->dtype, {{"R", sort->R}, {"D", args->x->shape[1]}}));
  return check_optional("row_id_map", args->row_id_map, kInt32, {{"R", sort->R}});
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec*, size_t* bytes) {
  ChunkSort sort;
  AB_RETURN_IF_ERROR(parse(args, &sort));
  *bytes = sort.workspace_bytes();
  return ok();
}

ab_status ab_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec) {
  ChunkSort sort;
  AB_RETURN_IF_ERROR(parse(args, &sort));
  AB_RETURN_IF_ERROR(check_workspace(exec, sort.workspace_bytes()));
  sort.lay_out(exec->workspace);
  sort.place(data<const int32_t>(args->split_sizes), data<const int32_t>(args->sorted_indices));

  const Rows x(args->x);
  const Rows out(args->out);
  int32_t* row_id_map = data<int32_t>(args->row_id_map);
  const Blocks blocks(sort.R, 2 * x.bytes);
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int) {
    int64_t row = blocks.begin(block);
    // the chunk that holds `row`: the last that begins at or before it
    int64_t chunk = std::upper_bound(sort.unsorted, sort.unsorted + sort.S + 1, row) - sort.unsorted - 1;
    for (const int64_t end = blocks.end(block); row < end; ++chunk) {
      const int64_t count = std::min(end, sort.unsorted[chunk + 1]) - row;
      const int64_t to = sort.sorted[chunk] + row - sort.unsorted[chunk];
      if (x.bytes > 0) {
        std::memcpy(out[args->inverse ? row : to], x[args->inverse ? to : row], static_cast<size_t>(count * x.bytes));
      }
      for (int64_t i = 0; i < count && row_id_map != nullptr; ++i) row_id_map[row + i] = static_cast<int32_t>(to + i);
      row += count;
    }
  });
  return ok();
}

}  // extern "C"
