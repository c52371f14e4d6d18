// Tensor maps: descriptors through which TMA accesses a matrix in device memory. The host encodes them and passes them
// as kernel arguments.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "anabranch/types.h"

namespace anabranch::cuda {

// Whether a tensor map can describe a matrix: rows must be whole 16-byte chunks at a 16-byte aligned address.
bool fits_tensor_map(const void* data, int32_t dtype, int64_t columns);

// Boxes of `box_columns` x `box_rows` of a row-major [rows, columns], in which any range of rows acts as a matrix of
// its own: reads past the range return zeros, and writes past it are discarded. Coordinates are WindowCoordinates
// (tma.cuh); a range has fewer than kMaxWindowRows rows. box_columns must fill 128 bytes; shared memory has the
// 128-byte swizzle. `stride`: elements from row to row; 0: `columns`.
ab_status make_row_window_map(const char* name, const void* data, int32_t dtype, int64_t columns, int box_columns,
                              int box_rows, CUtensorMap* map, int64_t stride = 0);

// Boxes of a row-major [matrices, rows, columns]. Each box is within one matrix; elements outside it read as zeros.
// `data` must be the address of mapped memory, even if the first matrices are never read: for a box that lies wholly
// outside a matrix, TMA accesses this address (seen on an H200).
// `matrix_rows`: rows from one matrix to the next; 0: `rows`.
ab_status make_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                            int64_t columns, int box_columns, int box_rows, CUtensorMap* map, int64_t stride = 0,
                            int64_t matrix_rows = 0);

// Boxes of 32 rows of a row-major [matrices, rows, columns], where `rows` is a multiple of 8. Row 8 q + 2 j + b of a
// box, b < 2, becomes row 8 j + 2 q + b in shared memory. The accumulators of m64nN of a thread are at columns 8 j + 2
// q + b; over all j they then are 8 adjacent columns of the matrix.
ab_status make_shuffled_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                                     int64_t columns, int box_columns, CUtensorMap* map);

constexpr int64_t kMaxWindowRows = int64_t{1} << 30;

}  // namespace anabranch::cuda
