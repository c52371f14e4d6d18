// A stable counting sort by expert: every block of tokens counts its slots, one scan over (expert, block) turns counts
// into first rows, and every block places its slots. The result does not depend on how tokens fall into blocks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "anabranch/dispatch.h"
#include "dispatch/maps.h"

namespace anabranch {
namespace {

struct Plan {
  const int32_t* experts = nullptr;
  const uint8_t* routing_map = nullptr;
  Maps maps;
  int64_t E = 0;
  int64_t align = 1;
  int64_t blocks = 0;

  // workspace
  int64_t* start = nullptr;    // [E+1] first row of every expert, aligned but not clipped
  int64_t* padding = nullptr;  // [E] rows of padding before it
  int64_t* dropped = nullptr;  // [blocks]
  int32_t* next = nullptr;     // [blocks, E] slots counted; then the row, as if without padding, of the next slot
  int32_t* count = nullptr;    // [E]

  // Places the arrays in the workspace, where there is one; returns the bytes they take.
  size_t lay_out(void* workspace) {
    size_t bytes = 0;
    const auto take = [&]<class T>(T** array, int64_t size) {
      if (workspace != nullptr) *array = reinterpret_cast<T*>(static_cast<char*>(workspace) + bytes);
      bytes += static_cast<size_t>(size) * sizeof(T);
    };
    take(&start, E + 1);
    take(&padding, E);
    take(&dropped, blocks);
    take(&next, blocks * E);
    take(&count, E);
    return bytes;
  }

  int64_t begin(int64_t block) const { return maps.T * block / blocks; }
  int64_t end(int64_t block) const { return maps.T * (block + 1) / blocks; }
};

ab_status parse(const ab_plan_args* args, const ab_exec* exec, Plan* plan) {
  AB_RETURN_IF_ERROR(check_struct("ab_plan_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  if (args->num_experts < 1) return AB_INVALID("num_experts: got %d, expected at least 1", args->num_experts);
  if (args->align_size < 0) return AB_INVALID("align_size: got %d, expected at least 0", args->align_size);
  if ((args->experts == nullptr) == (args->routing_map == nullptr)) {
    return AB_INVALID("experts: got %s, expected either experts or routing_map",
                      args->experts == nullptr ? "neither it nor routing_map" : "it and routing_map");
  }
  const int64_t E = plan->E = args->num_experts;
  Maps& maps = plan->maps;
  plan->align = std::max(args->align_size, 1);
  if (args->experts != nullptr) {
    AB_RETURN_IF_ERROR(check_tensor("experts", args->experts, kInt32, {{"T"}, {"K"}}));
    maps.T = args->experts->shape[0];
    maps.K = args->experts->shape[1];
    if (maps.K < 1) return AB_INVALID("experts: got K 0, expected at least 1 expert a token");
    AB_RETURN_IF_ERROR(check_num_slots("experts", maps.T, maps.K));
    if (args->row_id_map != nullptr)
      return AB_INVALID("row_id_map: got one with experts, expected routing_map with it");
  } else {
    AB_RETURN_IF_ERROR(check_tensor("routing_map", args->routing_map, kBool, {{"T"}, {"E", E}}));
    maps.T = args->routing_map->shape[0];
    maps.K = E;
    AB_RETURN_IF_ERROR(check_num_slots("routing_map", maps.T, E));
  }
  plan->experts = data<const int32_t>(args->experts);
  plan->routing_map = data<const uint8_t>(args->routing_map);

  AB_RETURN_IF_ERROR(check_optional("tokens_per_expert", args->tokens_per_expert, kInt32, {{"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("group_sizes", args->group_sizes, kInt32, {{"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("offsets", args->offsets, kInt32, {{"E+1", E + 1}}));
  AB_RETURN_IF_ERROR(check_optional("dropped", args->dropped, kInt32, {}));
  AB_RETURN_IF_ERROR(check_optional("row_id_map", args->row_id_map, kInt32, {{"T", maps.T}, {"2E+1", 2 * E + 1}}));
  if (args->row_of_slot != nullptr) {
    AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, maps.T, {"K", maps.K}, &maps));
  }
  AB_RETURN_IF_ERROR(check_slot_of_row(args->slot_of_row, &maps));
  if (maps.R % plan->align != 0) {
    return AB_INVALID("slot_of_row: got %lld rows, expected a multiple of align_size %lld",
                      static_cast<long long>(maps.R), static_cast<long long>(plan->align));
  }
  // A block has at least 4 E slots, so that the scan costs less than the slots, and enough to keep a thread busy.
  const int64_t slots = maps.T * maps.K;
  plan->blocks = std::clamp<int64_t>(slots / std::max<int64_t>(1 << 15, 4 * E), 1, 4 * num_threads(exec));
  return ok();
}

// Calls f(slot, expert) for the slots of token t that name an expert, ascending; returns how many indices are invalid.
template <class F>
[[gnu::always_inline]] inline int64_t for_each_slot(const Plan& plan, int64_t t, const F& f) {
  int64_t invalid = 0;
  const int64_t first = t * plan.maps.K;
  if (plan.experts != nullptr) {
    for (int64_t slot = first; slot < first + plan.maps.K; ++slot) {
      const int32_t expert = plan.experts[slot];
      if (Maps::is_index(expert, plan.E)) {
        f(slot, expert);
      } else {
        invalid += expert != -1;
      }
    }
    return invalid;
  }
  const uint8_t* routed = plan.routing_map + first;
  int64_t e = 0;
  for (; e + 8 <= plan.E; e += 8) {  // mostly zeros: eight at a time
    uint64_t eight;
    std::memcpy(&eight, routed + e, 8);
    if (eight == 0) continue;
    for (int64_t i = e; i < e + 8; ++i) {
      if (routed[i] != 0) f(first + i, static_cast<int32_t>(i));
    }
  }
  for (; e < plan.E; ++e) {
    if (routed[e] != 0) f(first + e, static_cast<int32_t>(e));
  }
  return 0;
}

void count_slots(const Plan& plan, int64_t block) {
  int32_t* counts = plan.next + block * plan.E;
  std::fill_n(counts, plan.E, 0);
  int64_t invalid = 0;
  for (int64_t t = plan.begin(block); t < plan.end(block); ++t) {
    invalid += for_each_slot(plan, t, [&](int64_t, int32_t expert) { ++counts[expert]; });
  }
  plan.dropped[block] = invalid;
}

// Counts of (block, expert) to first rows, experts first.
void scan(const Plan& plan) {
  int32_t packed = 0;  // rows of the layout without padding; T*K < 2^31
  plan.start[0] = 0;
  for (int64_t e = 0; e < plan.E; ++e) {
    const int32_t first = packed;
    plan.padding[e] = plan.start[e] - first;
    for (int64_t block = 0; block < plan.blocks; ++block) {
      int32_t& next = plan.next[block * plan.E + e];
      packed += std::exchange(next, packed);
    }
    plan.count[e] = packed - first;
    plan.start[e + 1] = plan.start[e] + (plan.count[e] + plan.align - 1) / plan.align * plan.align;
  }
}

void place_slots(const Plan& plan, int64_t block, int32_t* row_id_map) {
  const Maps& maps = plan.maps;
  const int64_t begin = plan.begin(block);
  const int64_t end = plan.end(block);
  if (maps.row_of_slot != nullptr) std::fill(maps.row_of_slot + begin * maps.K, maps.row_of_slot + end * maps.K, -1);
  int32_t* next = plan.next + block * plan.E;
  int64_t dropped = 0;
  for (int64_t t = begin; t < end; ++t) {
    int32_t* ids = row_id_map == nullptr ? nullptr : row_id_map + t * (2 * plan.E + 1);
    int64_t n = 0;
    if (ids != nullptr) std::fill_n(ids, 2 * plan.E, -1);
    for_each_slot(plan, t, [&](int64_t slot, int32_t expert) {
      const int32_t packed = next[expert]++;
      const int64_t row = packed + plan.padding[expert];
      if (ids != nullptr) {
        ids[n] = packed;
        ids[plan.E + n++] = expert;
      }
      if (row >= maps.R) {
        ++dropped;
        return;
      }
      maps.slot_of_row[row] = static_cast<int32_t>(slot);
      if (maps.row_of_slot != nullptr) maps.row_of_slot[slot] = static_cast<int32_t>(row);
    });
    if (ids != nullptr) {  // slots ascend, and so do their rows; the map wants them descending
      std::reverse(ids, ids + n);
      std::reverse(ids + plan.E, ids + plan.E + n);
      ids[2 * plan.E] = static_cast<int32_t>(n);
    }
  }
  plan.dropped[block] += dropped;
}

void fill_padding(const Plan& plan) {
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < std::min(end, plan.maps.R); ++row) plan.maps.slot_of_row[row] = -1;
  };
  for (int64_t e = 0; e < plan.E; ++e) fill(plan.start[e] + plan.count[e], plan.start[e + 1]);
  fill(plan.start[plan.E], plan.maps.R);
}

void write_sizes(const Plan& plan, const ab_plan_args& args) {
  const auto clipped = [&](int64_t e) { return static_cast<int32_t>(std::min(plan.start[e], plan.maps.R)); };
  if (args.tokens_per_expert != nullptr) std::copy_n(plan.count, plan.E, data<int32_t>(args.tokens_per_expert));
  for (int64_t e = 0; e < plan.E && args.group_sizes != nullptr; ++e) {
    data<int32_t>(args.group_sizes)[e] = clipped(e + 1) - clipped(e);
  }
  for (int64_t e = 0; e <= plan.E && args.offsets != nullptr; ++e) data<int32_t>(args.offsets)[e] = clipped(e);
  if (args.dropped != nullptr) {
    int64_t dropped = 0;
    for (int64_t block = 0; block < plan.blocks; ++block) dropped += plan.dropped[block];
    *data<int32_t>(args.dropped) = static_cast<int32_t>(dropped);
  }
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes) {
  Plan plan;
  AB_RETURN_IF_ERROR(parse(args, exec, &plan));
  *bytes = plan.lay_out(nullptr);
  return ok();
}

ab_status ab_plan(const ab_plan_args* args, const ab_exec* exec) {
  Plan plan;
  AB_RETURN_IF_ERROR(parse(args, exec, &plan));
  AB_RETURN_IF_ERROR(check_workspace(exec, plan.lay_out(nullptr)));
  plan.lay_out(exec->workspace);

  const int threads = num_threads(exec);
  int32_t* row_id_map = data<int32_t>(args->row_id_map);
  parallel_for(threads, plan.blocks, [&](int64_t block, int) { count_slots(plan, block); });
  scan(plan);
  parallel_for(plan.blocks == 1 ? 1 : threads, plan.blocks + 1, [&](int64_t block, int) {
    if (block < plan.blocks) {
      place_slots(plan, block, row_id_map);
    } else {
      fill_padding(plan);
    }
  });
  write_sizes(plan, *args);
  return ok();
}

}  // extern "C"
