// Divides loops over rows among threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/threads.h"

namespace anabranch {

// A loop over `count` items that move `bytes_per_item` bytes each, in blocks that are large enough to hand to another
// thread.
struct Blocks {
  static constexpr int64_t kBytes = 1 << 17;
  // Loops that move fewer bytes run on one thread: copying them takes about 200 us, and waking a thread may take as
  // long.
  static constexpr int64_t kSerialBytes = 1 << 21;

  int64_t count;
  int64_t bytes;  // total of all items
  int64_t size;

  Blocks(int64_t items, int64_t bytes_per_item)
      : count(items),
        bytes(items * bytes_per_item),
        size(std::clamp<int64_t>(kBytes / std::max<int64_t>(bytes_per_item, 1), 1, 1 << 14)) {}

  int threads(const ab_exec* exec) const { return bytes < kSerialBytes ? 1 : num_threads(exec); }
  int64_t blocks() const { return (count + size - 1) / size; }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(count, (block + 1) * size); }
};

}  // namespace anabranch
