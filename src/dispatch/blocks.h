// How loops over rows are divided between threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/threads.h"

namespace anabranch {

// A loop over `count` items that move `bytes_per_item` bytes each, in blocks that are large enough to hand to another
// thread.
struct Blocks {
  static constexpr int64_t kBytes = 1 << 17;
  // About 200 us of copying: waking another thread may take as long.
  static constexpr int64_t kSerialBytes = 1 << 21;

  int64_t count;
  int64_t bytes;  // of all items
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
