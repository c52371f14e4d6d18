#include "experts/cpu/product.h"

#include <algorithm>
#include <cstring>

#include "experts/block_scale.h"
#include "experts/cpu/gemm.h"
#include "experts/cpu/groups.h"
#include "experts/cpu/packed.h"
#include "experts/packed_check.h"

namespace anabranch {
namespace {

// oneDNN compiles bfloat16 GEMMs per shape: rounding row counts up keeps the number of shapes small.
constexpr int64_t kRowPadding = 8;
constexpr int64_t kFloat = sizeof(float);
static_assert(kTileRows % kRowPadding == 0 && kTileDepth % kRowPadding == 0,
              "full tiles and depths must need no padding rows");

// Whether a GEMM can read a matrix in place; for a packed one, whether it could read the values in its place.
bool is_ready(const Matrix& m, bool bf16) {
  return m.rows == nullptr && m.value_dtype() == (bf16 ? AB_BFLOAT16 : AB_FLOAT32);
}

// oneDNN walks down the columns of op(B). Rows that are whole pages apart fall into the same cache sets; copying the
// block first is faster.
bool aliases(const Matrix& b, bool transposed) { return !transposed && b.stride % 1024 == 0; }

// Whether both operands are multiplied in bfloat16, in blocks of kBf16Depth terms.
bool as_bf16(const Matrix& a, const Matrix& b) {
  return a.value_dtype() == AB_BFLOAT16 && b.value_dtype() == AB_BFLOAT16 && bf16_products() == Bf16Products::native;
}
constexpr int64_t kBf16Depth = 2 * kTileDepth;

// oneDNN chooses kernels by divisors of the distance between rows, up to this one.
constexpr int64_t kStrideDivisor = 1024;

// The distance between rows of an unpacked block, for rows that are `stride` elements apart in the matrix: oneDNN
// treats both alike, so results have the same bits as with the whole matrix unpacked.
int64_t unpacked_stride(int64_t columns, int64_t stride) { return columns + (stride - columns) % kStrideDivisor; }

// Bytes of a float32 block, with padding rows. Twice as many bfloat16 terms fit. Blocks begin at cache lines.
int64_t block_bytes(int64_t rows, int64_t columns) {
  constexpr int64_t kCacheLine = 64;
  const int64_t padded_rows = (rows + kRowPadding - 1) / kRowPadding * kRowPadding;
  return (padded_rows * columns * kFloat + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Copies rows in their stored dtype, gathered, and zeros the padding rows below.
void copy_rows(const Matrix& m, int64_t rows, int64_t padded_rows, int64_t columns, char* to) {
  const int64_t size = dtype_size(m.dtype);
  for (int64_t i = 0; i < padded_rows; ++i, to += columns * size) {
    const int64_t row = i >= rows ? -1 : m.rows == nullptr ? i : m.rows[i];
    if (row < 0) {
      std::memset(to, 0, static_cast<size_t>(columns * size));
    } else {
      std::memcpy(to, static_cast<const char*>(m.data) + row * m.stride * size, static_cast<size_t>(columns * size));
    }
  }
}

}  // namespace

Matrix matrix_of(const ab_tensor* tensor, int64_t offset, int64_t stride, const int32_t* rows) {
  char* data = anabranch::data<char>(tensor);
  if (data != nullptr) data += offset * dtype_size(tensor->dtype);
  return {data, tensor == nullptr ? AB_FLOAT32 : tensor->dtype, stride, rows};
}

Matrix quantized_matrix(const ab_tensor* tensor, const ab_tensor* scales, int64_t columns) {
  return {data<void>(tensor), AB_FLOAT8_E4M3, columns, nullptr, {data<float>(scales), columns / kScaleBlock, 1, 1}};
}

Matrix at(const Matrix& m, int64_t row, int64_t column) {
  if (m.data == nullptr) return m;
  Matrix from = m;
  if (m.is_packed()) {
    from.packed.row += row;
    from.packed.column += column;
    return from;
  }
  const int64_t skipped = m.rows == nullptr ? row : 0;
  from.data = static_cast<char*>(m.data) + (skipped * m.stride + column) * dtype_size(m.dtype);
  if (m.rows != nullptr) from.rows += row;
  if (m.scales.data != nullptr) {
    from.scales.data += skipped / m.scales.block_rows * m.scales.row_stride;
    from.scales.data += column / kScaleBlock * m.scales.column_stride;
  }
  return from;
}

int64_t packed_block_bytes(const ab_tensor* weights, bool transposed, int64_t n, int64_t k) {
  if (!is_packed(weights)) return 0;
  // Float32 values are multiplied in blocks of all k terms.
  const int64_t columns = std::min(n, kTileColumns);
  return transposed ? block_bytes(columns, k) : block_bytes(k, std::min(n, columns + kStrideDivisor));
}

// Blocks are as small as the operands allow: large workspaces cost page faults in every call of a small layer.
Products::Products(Workspace& workspace, int threads, int64_t rows, int64_t max_width, int64_t tile_columns,
                   int64_t packed_bytes)
    : kernels_(AB_SELECT_ISA(kExperts)),
      a_bytes_(std::max(block_bytes(std::min(rows, kTileRows), std::min(max_width, kTileDepth)),
                        block_bytes(std::min(rows, kTileDepth), std::min(max_width, kTileRows)))),
      b_bytes_(std::max(block_bytes(std::min(std::max(rows, max_width), kTileDepth), std::min(max_width, kTileColumns)),
                        packed_bytes)),
      c_bytes_(block_bytes(std::min(std::max(rows, max_width), kTileRows), tile_columns)),
      memory_(workspace.take<char>(threads * (a_bytes_ + b_bytes_ + c_bytes_))) {}

float* Products::tile(int thread) const {
  return reinterpret_cast<float*>(memory_ + thread * (a_bytes_ + b_bytes_ + c_bytes_) + a_bytes_ + b_bytes_);
}

Matrix Products::prepare(const Matrix& m, bool bf16, int64_t rows, int64_t padded_rows, int64_t columns, char* to,
                         bool copy) const {
  if (m.is_packed()) return unpack(m, bf16, rows, padded_rows, columns, to, copy);
  if (is_ready(m, bf16) && rows == padded_rows && !copy) return m;
  if (bf16) {
    copy_rows(m, rows, padded_rows, columns, to);
  } else {
    kernels_.load(m, rows, padded_rows, columns, reinterpret_cast<float*>(to));
  }
  return {to, bf16 ? AB_BFLOAT16 : AB_FLOAT32, columns, nullptr};
}

// Like prepare(). Where prepare() would read plain weights in place, the unpacked block gets an equivalent row stride,
// so that oneDNN computes the same bits (unpacked_stride()).
Matrix Products::unpack(const Matrix& m, bool bf16, int64_t rows, int64_t padded_rows, int64_t columns, char* to,
                        bool copy) const {
  const bool in_place = is_ready(m, bf16) && rows == padded_rows && !copy;
  const int64_t stride = in_place ? unpacked_stride(columns, m.stride) : columns;
  const int32_t dtype = bf16 ? AB_BFLOAT16 : AB_FLOAT32;
  AB_SELECT_ISA(kPacked).unpack(m, rows, padded_rows, columns, dtype, to, stride);
  return {to, dtype, stride, nullptr};
}

void Products::multiply(int thread, const Matrix& a, bool transpose_a, std::span<const RightHandSide> right_hand_sides,
                        bool transpose_b, int64_t m, int64_t n, int64_t k, int64_t readable_rows) {
  char* a_memory = memory_ + thread * (a_bytes_ + b_bytes_ + c_bytes_);
  char* b_memory = a_memory + a_bytes_;
  const bool bf16 = as_bf16(a, right_hand_sides[0].b);
  const bool in_place = !bf16 && is_ready(a, false) && is_ready(right_hand_sides[0].b, false) &&
                        !aliases(right_hand_sides[0].b, transpose_b);
  const int64_t depth = in_place ? k : bf16 ? kBf16Depth : kTileDepth;
  const auto padded = [bf16](int64_t rows) {
    return bf16 ? (rows + kRowPadding - 1) / kRowPadding * kRowPadding : rows;
  };
  if (k == 0) {
    for (const RightHandSide& rhs : right_hand_sides) {
      if (rhs.adds) continue;
      const int64_t size = dtype_size(rhs.c.dtype);
      for (int64_t i = 0; i < m; ++i) {
        std::memset(static_cast<char*>(rhs.c.data) + i * rhs.c.stride * size, 0, static_cast<size_t>(n * size));
      }
    }
  }
  for (int64_t begin = 0; begin < k; begin += depth) {
    const int64_t terms = std::min(depth, k - begin);
    GemmShape shape{transpose_a, transpose_b, false, false, m, n, terms, 0, 0, 0};
    (transpose_a ? shape.k : shape.m) = padded(transpose_a ? terms : m);
    const Matrix a_block = transpose_a ? prepare(at(a, begin, 0), bf16, terms, shape.k, m, a_memory, false)
                                       : prepare(at(a, 0, begin), bf16, readable_rows >= shape.m ? shape.m : m, shape.m,
                                                 terms, a_memory, false);
    shape.lda = a_block.stride;
    for (const RightHandSide& rhs : right_hand_sides) {
      const Matrix b_block =
          transpose_b ? prepare(at(rhs.b, 0, begin), bf16, n, n, terms, b_memory, false)
                      : prepare(at(rhs.b, begin, 0), bf16, terms, shape.k, n, b_memory, !bf16 && aliases(rhs.b, false));
      shape.ldb = b_block.stride;
      shape.ldc = rhs.c.stride;
      shape.c_is_bf16 = rhs.c.dtype == AB_BFLOAT16;
      shape.accumulate = begin > 0 || rhs.adds;
      const int failure = bf16 ? gemm_bf16(shape, a_block.data, b_block.data, rhs.c.data)
                               : gemm_f32(shape, static_cast<const float*>(a_block.data),
                                          static_cast<const float*>(b_block.data), static_cast<float*>(rhs.c.data));
      if (failure != 0) failure_.store(failure, std::memory_order_relaxed);
    }
  }
}

bool Products::can_write(int32_t dtype, const Matrix& a, const Matrix& b, int64_t k) {
  return dtype == AB_FLOAT32 || (dtype == AB_BFLOAT16 && as_bf16(a, b) && k <= kBf16Depth);
}

ab_status Products::check(int32_t a_dtype, int32_t b_dtype) {
  return a_dtype == AB_BFLOAT16 && b_dtype == AB_BFLOAT16 ? check_bf16_products() : ok();
}

ab_status Products::status() const {
  const int failure = failure_.load(std::memory_order_relaxed);
  return failure == 0 ? ok() : gemm_error(failure);
}

}  // namespace anabranch
