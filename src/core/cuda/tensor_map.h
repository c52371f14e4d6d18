// Tensor maps: how the copy engine (TMA) sees a matrix in device memory. Made on the host, passed as kernel arguments.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "anabranch/types.h"

namespace anabranch::cuda {

// What a tensor map can describe: rows of whole 16-byte chunks, from a 16-byte aligned address.
bool fits_tensor_map(const void* data, int32_t dtype, int64_t columns);

// Boxes of `box_columns` x `box_rows` of a row-major [rows, columns] of which any range of rows is a matrix of its own:
// reading past the range gives zeros, writing past it is left out. Coordinates in window_coordinates (tma.cuh); rows
// of a range less than kMostWindowRows. box_columns fill 128 bytes; shared memory has the 128-byte swizzle. `stride`:
// elements from row to row; 0: `columns`.
ab_status make_row_window_map(const char* name, const void* data, int32_t dtype, int64_t columns, int box_columns,
                              int box_rows, CUtensorMap* map, int64_t stride = 0);

// Boxes of a row-major [matrices, rows, columns], each of one matrix, zeros outside of it. `matrix_rows`: from matrix
// to matrix; 0: `rows`.
ab_status make_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                            int64_t columns, int box_columns, int box_rows, CUtensorMap* map, int64_t stride = 0,
                            int64_t matrix_rows = 0);

// Boxes of 32 rows of the same, `rows` a multiple of 8: row 8 q + 2 j + b of a box, b < 2, comes as its row 8 j + 2 q +
// b. For the thread whose accumulators of m64nN stand at columns 8 j + 2 q + b, those of all j are 8 neighbours.
ab_status make_shuffled_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                                     int64_t columns, int box_columns, CUtensorMap* map);

constexpr int64_t kMostWindowRows = int64_t{1} << 30;

}  // namespace anabranch::cuda
