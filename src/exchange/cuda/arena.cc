#include "exchange/cuda/arena.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

namespace anabranch::cuda {
namespace {

using exchange::Flags;
using exchange::kMaxRanks;
using exchange::Report;
using exchange::Word;

// cudaIpc shares whole blocks of 2 MiB, from which smaller allocations are cut. Whole blocks share nothing else.
constexpr size_t kSharedBytes = 2 << 20;
size_t round_up(size_t bytes) { return std::max((bytes + kSharedBytes - 1) / kSharedBytes, size_t{1}) * kSharedBytes; }

struct Known {
  Arena arena;
  bool retired = false;
  Peers peers;
  bool freed = false;
};

// Never destroyed: destructors of other static objects may still use it.
std::vector<Known>& arenas() {
  static auto* const known = new std::vector<Known>;
  return *known;
}

std::vector<cudaEvent_t*> events_of(Arena* arena) {
  std::vector<cudaEvent_t*> events{&arena->fork};
  for (int b = 0; b < exchange::kBuffers; ++b) events.insert(events.end(), {&arena->pushed[b], &arena->copied[b]});
  return events;
}

ab_status allocate(int64_t bytes, int rank, Arena* arena) {
  AB_RETURN_IF_CUDA_ERROR("cudaMalloc of the buffers",
                          cudaMalloc(reinterpret_cast<void**>(&arena->buffers), round_up(static_cast<size_t>(bytes))));
  AB_RETURN_IF_CUDA_ERROR("cudaMalloc of the flags",
                          cudaMalloc(reinterpret_cast<void**>(&arena->flags), round_up(sizeof(Flags))));
  AB_RETURN_IF_CUDA_ERROR("cudaHostAlloc", cudaHostAlloc(reinterpret_cast<void**>(&arena->report), sizeof(Report),
                                                         cudaHostAllocPortable | cudaHostAllocMapped));
  *arena->report = {};
  for (cudaStream_t* const stream : {&arena->side, &arena->local}) {
    AB_RETURN_IF_CUDA_ERROR("cudaStreamCreate", cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  }
  for (cudaEvent_t* const event : events_of(arena)) {
    AB_RETURN_IF_CUDA_ERROR("cudaEventCreate", cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  Flags flags{};
  for (int b = 0; b < exchange::kBuffers; ++b) flags.use[b] = flags.released[b][rank] = exchange::kNoUse;
  AB_RETURN_IF_CUDA_ERROR("cudaMemcpy",
                          cudaMemcpyAsync(arena->flags, &flags, sizeof(flags), cudaMemcpyHostToDevice, arena->side));
  AB_RETURN_IF_CUDA_ERROR("cudaStreamSynchronize", cudaStreamSynchronize(arena->side));
  return ok();
}

// An error is ignored: it is that of an earlier kernel, and the memory is gone with its context.
void free_arena(const Arena& arena, bool frees_flags) {
  Arena copy = arena;
  for (const cudaEvent_t* const event : events_of(&copy)) {
    if (*event != nullptr) cudaEventDestroy(*event);
  }
  for (const cudaStream_t stream : {arena.side, arena.local}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  if (arena.report != nullptr) cudaFreeHost(arena.report);
  if (arena.buffers != nullptr) cudaFree(arena.buffers);
  if (arena.flags != nullptr && frees_flags) cudaFree(arena.flags);
  cudaGetLastError();  // clear it
}

Known* find(uint64_t id) {
  const auto found = std::ranges::find(arenas(), id, [](const Known& known) { return known.arena.id; });
  return found == arenas().end() ? nullptr : &*found;
}

bool has_foreign_peers(const Known& known) {
  return std::ranges::any_of(known.peers.foreign, [](bool is_foreign) { return is_foreign; });
}

// Whether no peer accesses a retired arena any more.
bool is_unused(const Known& known) {
  for (const Known& other : arenas()) {
    if (!other.retired && std::ranges::find(other.peers.local, known.arena.id) != std::end(other.peers.local)) {
      return false;
    }
  }
  if (!has_foreign_peers(known)) return true;
  Word left[kMaxRanks] = {};
  if (cudaMemcpyAsync(left, known.arena.flags->left, sizeof(left), cudaMemcpyDeviceToHost, known.arena.side) !=
          cudaSuccess ||
      cudaStreamSynchronize(known.arena.side) != cudaSuccess) {
    cudaGetLastError();  // clear it
    return false;
  }
  for (int r = 0; r < kMaxRanks; ++r) {
    if (known.peers.foreign[r] && left[r] == 0) return false;
  }
  return true;
}

}  // namespace

ab_status create_arena(int device, int64_t bytes, int rank, Arena* arena) {
  static std::atomic<uint64_t> last_id{0};
  *arena = {};
  arena->device = device;
  ab_status status = allocate(bytes, rank, arena);
  if (status.code == AB_OK) {
    std::lock_guard lock(arena_mutex());
    try {
      arena->id = ++last_id;
      arenas().push_back({*arena, false, {}, false});
      return status;
    } catch (const std::bad_alloc&) {
      status = error(AB_OUT_OF_MEMORY, "exchange: no host memory");
    }
  }
  free_arena(*arena, true);
  return status;
}

std::mutex& arena_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

bool is_live(uint64_t id) {
  const Known* const known = find(id);
  return known != nullptr && !known->retired;
}

void set_peers(uint64_t id, const Peers& peers) {
  if (Known* const known = find(id)) known->peers = peers;
}

void retire(uint64_t id) {
  if (Known* const known = find(id)) known->retired = true;
}

void free_unused_arenas() {
  for (Known& known : arenas()) {
    if (!known.retired) continue;
    on_device(known.arena.device, [&] {
      if (!is_unused(known)) return ok();
      // The last access of a foreign peer is its write to `left`, through a mapping that it closes afterwards. To free
      // memory that another process has mapped is not allowed, so these flags stay.
      free_arena(known.arena, !has_foreign_peers(known));
      known.freed = true;
      return ok();
    });
  }
  std::erase_if(arenas(), [](const Known& known) { return known.freed; });
}

}  // namespace anabranch::cuda
