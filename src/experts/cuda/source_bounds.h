// Finds the rows of some sources among the rows of every group, which are in the order of the sources.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/row_part.h"
#include "experts/cuda/ops/tiles/groups.h"

namespace anabranch::cuda {

// Sources [first, end) of slots_per_source consecutive slots each.
struct Sources {
  int64_t first;
  int64_t end;
  int64_t slots_per_source;
  bool rounds_up;  // true: tiles shared with other sources belong to these sources; false: to the others
};

// bounds[e] = the first and the end row of the sources in group e (RowPart). If the rows of a group are not in
// ascending order of slots, the bounds are arbitrary rows of the group.
ab_status find_source_bounds(const Groups& groups, const RowMap& map, const Sources& sources, int32_t* bounds,
                             cudaStream_t stream);

}  // namespace anabranch::cuda
