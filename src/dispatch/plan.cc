// A stable counting sort by expert. Each block of tokens counts its slots; one scan over (expert, block) converts
// counts to first rows; each block places its slots. The result does not depend on the division of tokens into blocks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/entry.h"
#include "core/threads.h"
#include "dispatch/plan.h"

namespace anabranch {
namespace {

struct Plan {
  PlanCall call;
  int64_t blocks = 0;

  // workspace
  int64_t* start = nullptr;    // [E] first row of every expert, aligned but not clipped
  int64_t* padding = nullptr;  // [E] number of rows before the expert that are padding or belong to no expert
  int64_t* dropped = nullptr;  // [blocks]
  int32_t* next = nullptr;     // [blocks, E] number of slots; later the row, not counting padding, of the next slot
  int32_t* count = nullptr;    // [E]

  // Places the arrays in the workspace, unless it is null; returns their total size in bytes.
  size_t lay_out(void* workspace) {
    size_t bytes = 0;
    const auto take = [&]<class T>(T** array, int64_t size) {
      if (workspace != nullptr) *array = reinterpret_cast<T*>(static_cast<char*>(workspace) + bytes);
      bytes += static_cast<size_t>(size) * sizeof(T);
    };
    take(&start, call.E);
    take(&padding, call.E);
    take(&dropped, blocks);
    take(&next, blocks * call.E);
    take(&count, call.E);
    return bytes;
  }

  int64_t begin(int64_t block) const { return call.maps.T * block / blocks; }
  int64_t end(int64_t block) const { return call.maps.T * (block + 1) / blocks; }
};

ab_status parse(const ab_plan_args* args, const ab_exec* exec, Plan* plan) {
  AB_RETURN_IF_ERROR(check_plan(args, &plan->call));
  // A block has at least 4 E slots, so that the scan costs less than the slots, and enough slots to keep a thread busy.
  const int64_t slots = plan->call.maps.T * plan->call.maps.K;
  plan->blocks = std::clamp<int64_t>(slots / std::max<int64_t>(1 << 15, 4 * plan->call.E), 1, 4 * num_threads(exec));
  return ok();
}

// Calls f(slot, expert) for the slots of token t that name an expert, in ascending order. Returns the number of invalid
// indices.
template <class F>
[[gnu::always_inline]] inline int64_t for_each_slot(const Plan& plan, int64_t t, const F& f) {
  const PlanCall& call = plan.call;
  int64_t invalid = 0;
  const int64_t first = t * call.maps.K;
  if (call.format != SlotFormat::byte_map) {
    for (int64_t slot = first; slot < first + call.maps.K; ++slot) {
      const int32_t expert = call.expert_of(t, slot);
      if (Maps::is_index(expert, call.E)) {
        f(slot, expert);
      } else {
        invalid += expert != -1;
      }
    }
    return invalid;
  }
  const uint8_t* routed = static_cast<const uint8_t*>(call.slots) + first;
  int64_t e = 0;
  for (; e + 8 <= call.E; e += 8) {  // most bytes are zero: test eight at a time
    uint64_t eight;
    std::memcpy(&eight, routed + e, 8);
    if (eight == 0) continue;
    for (int64_t i = e; i < e + 8; ++i) {
      if (routed[i] != 0) f(first + i, static_cast<int32_t>(i));
    }
  }
  for (; e < call.E; ++e) {
    if (routed[e] != 0) f(first + e, static_cast<int32_t>(e));
  }
  return 0;
}

void count_slots(const Plan& plan, int64_t block) {
  int32_t* counts = plan.next + block * plan.call.E;
  std::fill_n(counts, plan.call.E, 0);
  int64_t invalid = 0;
  for (int64_t t = plan.begin(block); t < plan.end(block); ++t) {
    invalid += for_each_slot(plan, t, [&](int64_t, int32_t expert) { ++counts[expert]; });
  }
  plan.dropped[block] = invalid;
}

// Converts the counts of (block, expert) to first rows, experts outermost.
void scan(const Plan& plan) {
  const Regions& regions = plan.call.regions;
  int32_t packed = 0;  // rows of the layout without padding; T*K < 2^31
  int64_t row = 0;
  for (int64_t e = 0; e < plan.call.E; ++e) {
    const int32_t first = packed;
    if (e % regions.experts == 0) row = regions.begin(e);
    plan.start[e] = row;
    plan.padding[e] = row - first;
    for (int64_t block = 0; block < plan.blocks; ++block) {
      int32_t& next = plan.next[block * plan.call.E + e];
      packed += std::exchange(next, packed);
    }
    plan.count[e] = packed - first;
    row += regions.aligned(plan.count[e]);
  }
}

void place_slots(const Plan& plan, int64_t block) {
  const PlanCall& call = plan.call;
  const Maps& maps = call.maps;
  const int64_t E = call.E;
  const int64_t begin = plan.begin(block);
  const int64_t end = plan.end(block);
  if (maps.row_of_slot != nullptr) std::fill(maps.row_of_slot + begin * maps.K, maps.row_of_slot + end * maps.K, -1);
  int32_t* next = plan.next + block * E;
  int64_t dropped = 0;
  for (int64_t t = begin; t < end; ++t) {
    int32_t* ids = call.row_id_map == nullptr ? nullptr : call.row_id_map + t * (2 * E + 1);
    int64_t n = 0;
    if (ids != nullptr) std::fill_n(ids, 2 * E, -1);
    for_each_slot(plan, t, [&](int64_t slot, int32_t expert) {
      const int32_t packed = next[expert]++;
      const int64_t row = packed + plan.padding[expert];
      if (ids != nullptr) {
        ids[n] = packed;
        ids[E + n++] = expert;
      }
      if (row >= call.regions.end(expert)) {
        ++dropped;
        return;
      }
      maps.slot_of_row[row] = static_cast<int32_t>(slot);
      if (maps.row_of_slot != nullptr) maps.row_of_slot[slot] = static_cast<int32_t>(row);
    });
    if (ids != nullptr) {  // slots and rows ascend, but the map requires descending order
      std::reverse(ids, ids + n);
      std::reverse(ids + E, ids + E + n);
      ids[2 * E] = static_cast<int32_t>(n);
    }
  }
  plan.dropped[block] += dropped;
}

void fill_padding(const Plan& plan) {
  const Regions& regions = plan.call.regions;
  for (int64_t e = 0; e < plan.call.E; ++e) {
    // Fill up to the next expert's rows, or the end of the region.
    const bool last = (e + 1) % regions.experts == 0;
    const int64_t begin = regions.clip(e, plan.start[e] + plan.count[e]);
    const int64_t end = last ? regions.end(e) : regions.clip(e, plan.start[e + 1]);
    std::fill(plan.call.maps.slot_of_row + begin, plan.call.maps.slot_of_row + end, -1);
  }
}

void write_sizes(const Plan& plan) {
  const PlanCall& call = plan.call;
  if (call.tokens_per_expert != nullptr) std::copy_n(plan.count, call.E, call.tokens_per_expert);
  for (int64_t e = 0; e < call.E; ++e) {
    const int64_t begin = call.regions.clip(e, plan.start[e]);
    const int64_t end = call.regions.clip(e, plan.start[e] + call.regions.aligned(plan.count[e]));
    if (call.group_sizes != nullptr) call.group_sizes[e] = static_cast<int32_t>(end - begin);
    if (call.offsets != nullptr) call.offsets[e] = static_cast<int32_t>(begin);
    if (call.offsets != nullptr && e + 1 == call.E) call.offsets[call.E] = static_cast<int32_t>(end);
  }
  int64_t dropped = 0;
  for (int64_t block = 0; block < plan.blocks; ++block) dropped += plan.dropped[block];
  call.write_dropped(static_cast<int32_t>(dropped));
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  Plan plan;
  AB_RETURN_IF_ERROR(parse(args, exec, &plan));
  return report_workspace(plan.lay_out(nullptr), bytes);
}

ab_status ab_plan(const ab_plan_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  Plan plan;
  AB_RETURN_IF_ERROR(parse(args, exec, &plan));
  AB_RETURN_IF_ERROR(check_workspace(exec, plan.lay_out(nullptr)));
  plan.lay_out(exec->workspace);

  const int threads = num_threads(exec);
  parallel_for(threads, plan.blocks, [&](int64_t block, int) { count_slots(plan, block); });
  scan(plan);
  parallel_for(plan.blocks == 1 ? 1 : threads, plan.blocks + 1, [&](int64_t block, int) {
    if (block < plan.blocks) {
      place_slots(plan, block);
    } else {
      fill_padding(plan);
    }
  });
  write_sizes(plan);
  return ok();
}

}  // extern "C"
