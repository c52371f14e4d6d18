// Dispatch, combine and their backward passes on the GPU against the CPU. Results must have the same bits, except
// d_weights: the two backends add up their dot products in different orders.
#include <cmath>

#include "dispatch_case.h"

namespace anabranch::testing {
namespace {

constexpr int32_t kFloatDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};
constexpr int32_t kAddendDtypes[] = {0, AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};  // 0: no addend

// Checks d_weights[t, k] = <d_out[t], rows[row]>. The bound allows float32 rounding relative to the sum of |terms| and
// one rounding of the result.
void expect_d_weights(const Case& c, const Operands& in, const FloatTensor& d_weights) {
  for (int64_t slot = 0; slot < c.T * c.K; ++slot) {
    const int64_t row = in.row_of_slot[slot];
    if (row < 0 || row >= c.num_rows()) {
      ASSERT_EQ(bits_of(d_weights.get(slot)), 0u) << "slot " << slot << " has no row";
      continue;
    }
    double dot = 0.0;
    double magnitude = 0.0;
    for (int64_t i = 0; i < c.D; ++i) {
      const double term = double{in.d_out.get(slot / c.K * c.D + i)} * double{in.rows.get(row * c.D + i)};
      dot += term;
      magnitude += std::abs(term);
    }
    const double got = double{d_weights.get(slot)};
    if (std::isfinite(dot)) {
      ASSERT_LE(std::abs(got - dot), 2e-6 * magnitude + rounding_of(c.weights_dtype) * std::abs(dot) + 1e-7)
          << "slot " << slot;
    } else {
      ASSERT_TRUE(std::isnan(dot) ? std::isnan(got) : got == dot) << "slot " << slot;
    }
  }
}

void compare(const Case& c, const Operands& in, const Results& got, const Results& want) {
  ASSERT_TRUE(got.dispatched.is(want.dispatched)) << "dispatched rows";
  ASSERT_TRUE(got.scaled.is(want.scaled)) << "rows times weights";
  ASSERT_TRUE(got.out.is(want.out)) << "out";
  ASSERT_TRUE(got.d_x.is(want.d_x)) << "d_x";
  ASSERT_TRUE(got.d_rows.is(want.d_rows)) << "d_rows";
  ASSERT_TRUE(got.d_rows_alone.is(want.d_rows)) << "d_rows without d_weights";
  ASSERT_TRUE(got.d_weights_alone.is(got.d_weights)) << "d_weights without d_rows";
  expect_d_weights(c, in, got.d_weights);
}

void check(const Case& c, unsigned seed = 1) {
  SCOPED_TRACE(::testing::Message() << c);
  const Operands in(c, seed);
  const Results want(c);
  run_on_cpu(c, in, want);
  const Results got(c);
  run_on_gpu(c, in, got);
  if (!::testing::Test::HasFatalFailure()) compare(c, in, got, want);
}

class DispatchCuda : public CudaTest {};

TEST_F(DispatchCuda, EveryWidthDtypeAndAlignment) {
  unsigned seed = 0;
  for (const int64_t D : {1, 2, 3, 4, 7, 8, 24, 37, 64, 128, 130, 512, 513, 520, 1024, 1028, 1032, 1544, 2880, 4104}) {
    for (const int32_t dtype : kFloatDtypes) {
      for (const int64_t shift : {0, 1, 2}) {
        if (shift == 2 && D > 600) continue;
        Case c;
        c.T = D > 1000 ? 9 : 21;
        c.K = 1 + ++seed % 9;
        c.D = D;
        c.dtype = dtype;
        c.shift = shift;
        c.weighted = seed % 3 != 0;
        c.addend_dtype = kAddendDtypes[seed % 4];
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Rows have more columns than the warps of a block process at a time.
TEST_F(DispatchCuda, WideRows) {
  for (const int64_t D : {5000, 7168, 8192, 8200, 9003, 20000}) {
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
      Case c;
      c.T = 5;
      c.K = 5;
      c.D = D;
      c.dtype = dtype;
      c.addend_dtype = AB_FLOAT32;
      check(c, static_cast<unsigned>(D));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(DispatchCuda, EveryNumberOfSlots) {
  unsigned seed = 100;
  for (const int64_t K : {1, 2, 3, 4, 8, 9, 16, 31, 32, 33, 64, 65, 127, 128, 129, 160, 161, 300, 1000}) {
    for (const double share : {1.0, 0.3}) {
      Case c;
      c.T = 7;
      c.K = K;
      c.D = seed % 2 == 0 ? 72 : 37;
      c.E = 9;
      c.share = share;
      c.dtype = kFloatDtypes[++seed % 3];
      c.addend_dtype = kAddendDtypes[seed % 4];
      check(c, seed);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(DispatchCuda, EveryMixOfDtypes) {
  unsigned seed = 200;
  for (const int32_t dtype : kFloatDtypes) {
    for (const int32_t rows_dtype : kFloatDtypes) {
      for (const int32_t d_dtype : kFloatDtypes) {
        for (const int64_t D : {72, 37, 2056}) {
          Case c;
          c.T = 11;
          c.D = D;
          c.dtype = dtype;
          c.rows_dtype = rows_dtype;
          c.d_dtype = d_dtype;
          c.weights_dtype = kFloatDtypes[++seed % 3];
          check(c, seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(DispatchCuda, AddendsOfEveryDtype) {
  unsigned seed = 250;
  for (const int32_t dtype : kFloatDtypes) {
    for (const int32_t rows_dtype : kFloatDtypes) {
      for (const int32_t addend_dtype : kFloatDtypes) {
        for (const int64_t D : {72, 37, 2056}) {
          for (const int64_t shift : {0, 1, 4}) {  // a shift of 4 elements is 16-byte aligned only for 4-byte elements
            Case c;
            c.T = 11;
            c.D = D;
            c.dtype = dtype;
            c.rows_dtype = rows_dtype;
            c.d_dtype = kFloatDtypes[++seed % 3];
            c.addend_dtype = addend_dtype;
            c.shift = shift;
            check(c, seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(DispatchCuda, OnlyTheAddendIsUnaligned) {
  for (const int32_t dtype : kFloatDtypes) {
    for (const int32_t addend_dtype : kFloatDtypes) {
      SCOPED_TRACE(::testing::Message() << "dtype " << dtype << " addend " << addend_dtype);
      Case c;
      c.D = 520;
      c.dtype = dtype;
      c.addend_dtype = addend_dtype;
      const Operands in(c);
      const Results want(c);
      run_on_cpu(c, in, want);
      const Results got(c);
      Mirrors mirrors;
      ab_combine_args args = calls_on_gpu(c, in, got, &mirrors).combine;
      args.addend = mirrors.add(in.addend.view(), in.addend.element_bytes());
      EXPECT_OK(ab_cuda_combine(&args, nullptr));
      mirrors.fetch();
      ASSERT_TRUE(got.out.is(want.out));
    }
  }
}

TEST_F(DispatchCuda, OutMayAliasTheAddend) {
  for (const int32_t dtype : kFloatDtypes) {
    for (const int64_t D : {37, 2056}) {
      SCOPED_TRACE(::testing::Message() << "dtype " << dtype << " D " << D);
      Case c;
      c.T = 500;
      c.D = D;
      c.dtype = dtype;
      c.rows_dtype = AB_BFLOAT16;
      c.addend_dtype = dtype;
      const Operands in(c);
      const Results want(c);
      run_on_cpu(c, in, want);
      Mirrors mirrors;
      ab_combine_args args = calls_on_gpu(c, in, want, &mirrors).combine;
      args.out = args.addend;
      EXPECT_OK(ab_cuda_combine(&args, nullptr));
      mirrors.fetch();
      ASSERT_TRUE(in.addend.is(want.out));
    }
  }
}

TEST_F(DispatchCuda, ManyTokensPaddingAndDroppedSlots) {
  unsigned seed = 300;
  for (const int64_t T : {1, 2, 33, 1500}) {
    for (const int32_t align : {0, 1, 128}) {
      for (const double share : {0.0, 0.5, 1.0, 2.5}) {
        Case c;
        c.T = T;
        c.align = align;
        c.share = share;
        c.D = 40;
        c.dtype = kFloatDtypes[++seed % 3];
        c.addend_dtype = kAddendDtypes[seed % 4];
        check(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(DispatchCuda, EmptyTensors) {
  for (const int64_t T : {0, 5}) {
    for (const int64_t D : {0, 8}) {
      for (const double share : {0.0, 1.0}) {
        if (T > 0 && D > 0 && share > 0.0) continue;
        Case c;
        c.T = T;
        c.D = D;
        c.share = share;
        c.addend_dtype = AB_FLOAT32;
        check(c);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// With garbage indices, nothing outside a buffer is accessed and every result matches the CPU.
TEST_F(DispatchCuda, GarbageIndices) {
  for (unsigned seed = 400; seed < 412; ++seed) {
    Case c;
    c.T = 500;
    c.K = seed % 3 == 0 ? 40 : 4;
    c.D = seed % 2 == 0 ? 41 : 64;
    c.share = seed % 4 == 0 ? 0.2 : 1.0;
    c.dtype = kFloatDtypes[seed % 3];
    c.addend_dtype = kAddendDtypes[seed % 4];
    c.garbage = true;
    check(c, seed);
    if (HasFatalFailure()) return;
  }
}

TEST_F(DispatchCuda, NanInfinityAndZero) {
  for (unsigned seed = 500; seed < 506; ++seed) {
    Case c;
    c.D = seed % 2 == 0 ? 37 : 1032;
    c.dtype = kFloatDtypes[seed % 3];
    c.weights_dtype = kFloatDtypes[seed % 2];
    c.addend_dtype = kAddendDtypes[seed % 4];
    c.specials = true;
    check(c, seed);
    if (HasFatalFailure()) return;
  }
}

TEST_F(DispatchCuda, CopiesElementsOfEverySize) {
  const auto copies = [&]<class T>(T, int32_t dtype, int64_t D, int64_t shift) {
    SCOPED_TRACE(::testing::Message() << "dtype " << dtype << " D " << D << " shift " << shift);
    Case c;
    c.T = 30;
    const Operands in(c);
    Tensor<T> x({c.T, D}, dtype);
    for (int64_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i % 113 + 1);
    Tensor<T> want({c.num_rows(), D}, dtype);
    Tensor<T> got({c.num_rows(), D}, dtype);
    const ab_dispatch_args host{sizeof(host),          x.view(), in.row_of_slot.view(),
                                in.slot_of_row.view(), nullptr,  want.view()};
    EXPECT_OK(ab_dispatch(&host, nullptr));
    Mirrors mirrors;
    const int64_t bytes = shift * static_cast<int64_t>(sizeof(T));
    const ab_dispatch_args device{sizeof(device),
                                  mirrors.add(x.view(), bytes),
                                  mirrors.add(in.row_of_slot.view()),
                                  mirrors.add(in.slot_of_row.view()),
                                  nullptr,
                                  mirrors.add(got.view(), bytes)};
    EXPECT_OK(ab_cuda_dispatch(&device, nullptr));
    mirrors.fetch();
    ASSERT_TRUE(got.values() == want.values());
  };
  for (const int64_t D : {1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 1000, 2047}) {
    for (const int64_t shift : {0, 1, 2, 4}) {
      copies(uint8_t{}, AB_BOOL, D, shift);
      copies(uint8_t{}, AB_UINT8, D, shift);
      copies(int16_t{}, AB_INT16, D, shift);
      copies(int32_t{}, AB_INT32, D, shift);
      copies(int64_t{}, AB_INT64, D, shift);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(DispatchCuda, HasTheSameBitsInAGraph) {
  Case c;
  c.T = 700;
  c.K = 8;
  c.D = 2056;
  c.addend_dtype = AB_FLOAT32;
  const Operands in(c);
  const Results once(c);
  run_on_gpu(c, in, once);
  if (HasFatalFailure()) return;

  const Results replayed(c);
  Mirrors mirrors;
  const Calls calls = calls_on_gpu(c, in, replayed, &mirrors);
  replay_in_graph([&](cudaStream_t stream) { enqueue(calls, stream); });
  mirrors.fetch();
  compare(c, in, replayed, once);
  EXPECT_TRUE(replayed.d_weights.is(once.d_weights));
}

TEST_F(DispatchCuda, ErrorMessagesMatchTheCpu) {
  const Case c;
  const Operands in(c);
  const Results out(c);
  const Tensor<float> other({3, 3});
  const Tensor<int32_t> integers({c.T, c.D});
  const auto calls = [&] { return Calls(c, in, out, [](const ab_tensor* tensor, int64_t) { return tensor; }); };
  const auto same = [](const ab_status& cuda, const ab_status& cpu) {
    EXPECT_EQ(cuda.code, AB_INVALID_ARGUMENT);
    EXPECT_STREQ(cuda.message, cpu.message);
  };
  const auto dispatch = [&](auto change) {
    ab_dispatch_args args = calls().dispatch;
    change(&args);
    same(ab_cuda_dispatch(&args, nullptr), ab_dispatch(&args, nullptr));
  };
  dispatch([](ab_dispatch_args* args) { args->size = 3; });
  dispatch([](ab_dispatch_args* args) { args->x = nullptr; });
  dispatch([&](ab_dispatch_args* args) { args->x = integers.view(); });
  dispatch([&](ab_dispatch_args* args) { args->weights = other.view(); });
  dispatch([&](ab_dispatch_args* args) { args->rows = args->x; });
  const auto combine = [&](auto change) {
    ab_combine_args args = calls().combine;
    change(&args);
    same(ab_cuda_combine(&args, nullptr), ab_combine(&args, nullptr));
  };
  combine([&](ab_combine_args* args) { args->rows = integers.view(); });
  combine([](ab_combine_args* args) { args->row_of_slot = nullptr; });
  combine([&](ab_combine_args* args) { args->weights = other.view(); });
  combine([&](ab_combine_args* args) { args->out = other.view(); });
  combine([&](ab_combine_args* args) { args->addend = other.view(); });
  combine([&](ab_combine_args* args) { args->addend = integers.view(); });
  const auto backward = [&](auto change) {
    ab_combine_backward_args args = calls().both;
    change(&args);
    same(ab_cuda_combine_backward(&args, nullptr), ab_combine_backward(&args, nullptr));
  };
  backward([](ab_combine_backward_args* args) { args->rows = nullptr; });
  backward([&](ab_combine_backward_args* args) { args->d_out = integers.view(); });
  backward([&](ab_combine_backward_args* args) { args->d_rows = other.view(); });
  backward([&](ab_combine_backward_args* args) { args->d_weights = other.view(); });
  EXPECT_REFUSED(ab_cuda_dispatch(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_dispatch_args: got NULL");
}

// A device tensor without a host copy.
class DeviceTensor {
 public:
  DeviceTensor(int32_t dtype, int64_t rows, int64_t columns) : view_{nullptr, dtype, 2, {rows, columns}, nullptr} {
    EXPECT_CUDA(cudaMalloc(&view_.data, static_cast<size_t>(bytes_of(view_))));
    EXPECT_CUDA(cudaMemset(view_.data, 0xff, static_cast<size_t>(bytes_of(view_))));
  }
  ~DeviceTensor() { cudaFree(view_.data); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  const ab_tensor* view() const { return &view_; }
  // Copy the last elements to or from the host.
  template <class T>
  void set_last(const std::vector<T>& values) const {
    EXPECT_CUDA(cudaMemcpy(end() - values.size() * sizeof(T), values.data(), values.size() * sizeof(T),
                           cudaMemcpyHostToDevice));
  }
  template <class T>
  std::vector<T> last(size_t count) const {
    std::vector<T> values(count);
    EXPECT_CUDA(cudaMemcpy(values.data(), end() - count * sizeof(T), count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  char* end() const { return static_cast<char*>(view_.data) + bytes_of(view_); }
  ab_tensor view_;
};

// In buffers of more than 2^31 elements, the last tokens and rows have the same results as in a small call.
TEST_F(DispatchCuda, MoreThanTwoToThe31Elements) {
  SKIP_WITHOUT_GIB(12);
  Case c;
  c.T = 6;
  c.K = 3;
  c.D = 8192;
  c.align = 0;
  c.addend_dtype = AB_BFLOAT16;
  const Operands in(c);
  const Results want(c);
  run_on_gpu(c, in, want);
  if (HasFatalFailure()) return;
  const int64_t many = (int64_t{1} << 31) / c.D + 1000;
  const auto bits = [](const FloatTensor& tensor) {
    const uint16_t* data = static_cast<const uint16_t*>(tensor.view()->data);
    return std::vector<uint16_t>(data, data + tensor.size());
  };
  const auto expect_last = [&](const DeviceTensor& got, const FloatTensor& expected, const char* name) {
    EXPECT_TRUE(got.last<uint16_t>(static_cast<size_t>(expected.size())) == bits(expected)) << name;
  };
  Mirrors mirrors;
  const Calls small = calls_on_gpu(c, in, want, &mirrors);

  {  // many rows; only the last ones are assigned
    const int64_t R = many;
    std::vector<int32_t> row_of_slot = in.row_of_slot.values();
    for (int32_t& row : row_of_slot) row += row < 0 ? 0 : static_cast<int32_t>(R - c.num_rows());
    const Tensor<int32_t> moved({c.T, c.K}, row_of_slot);
    std::vector<int32_t> slots(static_cast<size_t>(R), -1);
    std::copy(in.slot_of_row.values().begin(), in.slot_of_row.values().end(), slots.end() - c.num_rows());
    const Tensor<int32_t> slot_of_row({R}, slots);
    const DeviceTensor rows(AB_BFLOAT16, R, c.D);
    const ab_tensor* to = mirrors.add(moved.view());
    const ab_tensor* from = mirrors.add(slot_of_row.view());
    ab_dispatch_args dispatch = small.dispatch;
    dispatch.row_of_slot = to;
    dispatch.slot_of_row = from;
    dispatch.rows = rows.view();
    EXPECT_OK(ab_cuda_dispatch(&dispatch, nullptr));
    expect_last(rows, want.dispatched, "dispatched rows");
    const int64_t before = (R - c.num_rows()) * c.D;
    std::vector<uint16_t> zeros(1000);
    EXPECT_CUDA(cudaMemcpy(zeros.data(), static_cast<uint16_t*>(rows.view()->data) + before - 1000, 2000,
                           cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::count(zeros.begin(), zeros.end(), 0), 1000) << "padding";

    const DeviceTensor out(AB_BFLOAT16, c.T, c.D);
    const DeviceTensor d_rows(AB_BFLOAT16, R, c.D);
    rows.set_last(bits(in.rows));
    ab_combine_args combine = small.combine;
    combine.rows = rows.view();
    combine.row_of_slot = to;
    combine.out = out.view();
    EXPECT_OK(ab_cuda_combine(&combine, nullptr));
    expect_last(out, want.out, "out");
    ab_combine_backward_args backward = small.both;
    backward.rows = rows.view();
    backward.row_of_slot = to;
    backward.slot_of_row = from;
    backward.d_rows = d_rows.view();
    EXPECT_OK(ab_cuda_combine_backward(&backward, nullptr));
    expect_last(d_rows, want.d_rows, "d_rows");
  }
  {  // many tokens; only the last ones have rows
    const int64_t T = many;
    const int32_t first_slot = static_cast<int32_t>((T - c.T) * c.K);
    const DeviceTensor row_of_slot(AB_INT32, T, c.K);  // 0xff: -1
    row_of_slot.set_last(in.row_of_slot.values());
    std::vector<int32_t> slots = in.slot_of_row.values();
    for (int32_t& slot : slots) slot += slot < 0 ? 0 : first_slot;
    const Tensor<int32_t> slot_of_row({c.num_rows()}, slots);
    const ab_tensor* from = mirrors.add(slot_of_row.view());
    const DeviceTensor x(AB_BFLOAT16, T, c.D);
    const DeviceTensor weights(AB_FLOAT32, T, c.K);
    const DeviceTensor d_weights(AB_FLOAT32, T, c.K);
    x.set_last(bits(in.d_out));
    const float* given = static_cast<const float*>(in.weights.view()->data);
    weights.set_last(std::vector<float>(given, given + in.weights.size()));
    const DeviceTensor d_rows(AB_BFLOAT16, c.num_rows(), c.D);
    ab_combine_backward_args backward = small.both;
    backward.d_out = x.view();
    backward.row_of_slot = row_of_slot.view();
    backward.slot_of_row = from;
    backward.weights = weights.view();
    backward.d_rows = d_rows.view();
    backward.d_weights = d_weights.view();
    EXPECT_OK(ab_cuda_combine_backward(&backward, nullptr));
    expect_last(d_rows, want.d_rows, "d_rows");
    const std::vector<float> last_d_weights = d_weights.last<float>(static_cast<size_t>(want.d_weights.size()) + 2);
    EXPECT_EQ(last_d_weights[0], 0.0f);
    EXPECT_EQ(last_d_weights[1], 0.0f);
    for (int64_t slot = 0; slot < want.d_weights.size(); ++slot) {
      EXPECT_EQ(last_d_weights[static_cast<size_t>(slot) + 2], want.d_weights.get(slot));
    }
    ab_combine_args combine = small.combine;
    combine.row_of_slot = row_of_slot.view();
    combine.weights = weights.view();
    combine.addend = x.view();
    combine.out = x.view();
    x.set_last(bits(in.addend));
    EXPECT_OK(ab_cuda_combine(&combine, nullptr));
    expect_last(x, want.out, "out");
    ab_dispatch_args scale = small.scale;
    scale.x = x.view();
    scale.row_of_slot = row_of_slot.view();
    scale.slot_of_row = from;
    scale.weights = weights.view();
    scale.rows = d_rows.view();
    x.set_last(bits(in.d_out));
    EXPECT_OK(ab_cuda_dispatch(&scale, nullptr));
    expect_last(d_rows, want.scaled, "rows times weights");
  }
}

}  // namespace
}  // namespace anabranch::testing
