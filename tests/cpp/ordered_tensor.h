// A float tensor in any memory order.
#pragma once

#include "float_tensor.h"

namespace anabranch::testing {

using Order = std::vector<int32_t>;  // the axes of a tensor in memory order, outermost first
using Doubles = std::vector<double>;

class OrderedTensor {
 public:
  // order: {} is row-major, without strides.
  OrderedTensor(const std::vector<int64_t>& shape, int32_t dtype, const Order& order = {})
      : memory_(shape, dtype), view_(*memory_.view()) {
    if (order.empty()) return;
    int64_t stride = 1;
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
      strides_[*axis] = stride;
      stride *= std::max<int64_t>(view_.shape[*axis], 1);
    }
    view_.strides = strides_;
  }
  OrderedTensor(const OrderedTensor&) = delete;
  OrderedTensor& operator=(const OrderedTensor&) = delete;

  const ab_tensor* view() const { return &view_; }
  const FloatTensor& memory() const { return memory_; }
  int64_t size() const { return memory_.size(); }

  // The i-th element in row-major order.
  double operator[](int64_t i) const { return static_cast<double>(memory_.get(offset_of(i))); }
  void set(int64_t i, double value) { memory_.set(offset_of(i), static_cast<float>(value)); }
  void fill(double value) {
    for (int64_t i = 0; i < size(); ++i) set(i, value);
  }

  Doubles values() const {
    Doubles values;
    for (int64_t i = 0; i < size(); ++i) values.push_back((*this)[i]);
    return values;
  }

 private:
  int64_t offset_of(int64_t i) const {
    if (view_.strides == nullptr) return i;
    int64_t offset = 0;
    for (int32_t axis = view_.rank; axis-- > 0; i /= view_.shape[axis]) {
      offset += i % view_.shape[axis] * view_.strides[axis];
    }
    return offset;
  }

  FloatTensor memory_;
  int64_t strides_[AB_MAX_RANK] = {};
  ab_tensor view_;
};

}  // namespace anabranch::testing
