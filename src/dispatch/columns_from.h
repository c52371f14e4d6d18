// A window of columns of rows, for results that are computed in chunks of columns.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "dispatch/elements.h"

namespace anabranch {

// The rows of a tensor from column `first` on; NULL data if the tensor is NULL. Their stride is that of the tensor.
inline Rows columns_from(const ab_tensor* tensor, int64_t first) {
  Rows rows(tensor);
  if (rows.data != nullptr) rows.data += first * dtype_size(rows.dtype);
  return rows;
}

}  // namespace anabranch
