// Arguments and handles of exchanges, which are checked without a device.
#include "exchange/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "exchange/chunks.h"
#include "exchange/handle.h"
#include "support.h"

namespace anabranch::exchange::testing {
namespace {

using anabranch::testing::Tensor;

ab_exchange_create_args create_args() { return {sizeof(ab_exchange_create_args), 0, 1, 4, 0, {1000, 0, 64, 0}}; }

ab_status create(const ab_exchange_create_args& args, const char* variable = nullptr, uint64_t* limit = nullptr) {
  Shape shape;
  uint64_t unused = 0;
  return check_create(&args, variable, &shape, limit == nullptr ? &unused : limit);
}

TEST(ExchangeCreate, NamesTheBadArgument) {
  EXPECT_OK(create(create_args()));
  ab_exchange_create_args args = create_args();
  for (const int32_t ranks : {0, -1, 17}) {
    args.ranks = ranks;
    EXPECT_REFUSED(create(args), AB_INVALID_ARGUMENT, "expected an integer in [1, 16]");
  }
  args = create_args();
  for (const int32_t rank : {-1, 4}) {
    args.rank = rank;
    EXPECT_REFUSED(create(args), AB_INVALID_ARGUMENT, "expected an integer in [0, ranks=4)");
  }
  args = create_args();
  args.device = -1;
  EXPECT_REFUSED(create(args), AB_INVALID_ARGUMENT, "device: got -1");
  args = create_args();
  args.buffer_bytes[2] = -5;
  EXPECT_REFUSED(create(args), AB_INVALID_ARGUMENT, "buffer_bytes[2]: got -5");
  args = create_args();
  for (const float timeout : {-1.0f, 2e6f, std::numeric_limits<float>::quiet_NaN()}) {
    args.timeout = timeout;
    EXPECT_REFUSED(create(args), AB_INVALID_ARGUMENT, "timeout: got ");
  }
}

TEST(ExchangeCreate, TheTimeLimitIsTheOptionThenTheVariableThenTheDefault) {
  uint64_t limit = 0;
  ab_exchange_create_args args = create_args();
  EXPECT_OK(create(args, nullptr, &limit));
  EXPECT_EQ(limit, 600'000'000'000u);
  EXPECT_OK(create(args, "", &limit));
  EXPECT_EQ(limit, 600'000'000'000u);
  EXPECT_OK(create(args, "2.5", &limit));
  EXPECT_EQ(limit, 2'500'000'000u);
  args.timeout = 1;
  EXPECT_OK(create(args, "soon", &limit));
  EXPECT_EQ(limit, 1'000'000'000u);
  args.timeout = 0;
  for (const char* value : {"soon", "0", "-3", "3s", "nan", "1e9"}) {
    EXPECT_REFUSED(create(args, value), AB_UNSUPPORTED,
                   (std::string("ANABRANCH_EXCHANGE_TIMEOUT: got ") + value).c_str());
  }
}

Shape shape_of(int32_t rank, int32_t ranks, int64_t bytes) { return {rank, ranks, {0, bytes, 0, 0}}; }

ab_exchange_all_gather_args gather_args(const ab_tensor* x, const ab_tensor* out) {
  return {sizeof(ab_exchange_all_gather_args), nullptr, 1, 0, 0, 0, x, out, nullptr, nullptr, nullptr, nullptr};
}
ab_exchange_all_to_all_args regions_args(const ab_tensor* x, const ab_tensor* out) {
  return {sizeof(ab_exchange_all_to_all_args), nullptr, 1, 1, 0, 0, x, out};
}

TEST(ExchangeCalls, BlocksAreThoseOfTheShapes) {
  const Tensor<float> x({6, 5});
  const Tensor<float> gathered({18, 5});
  const Tensor<float> exchanged({6, 5});
  Call call;
  const ab_exchange_all_gather_args gather = gather_args(x.view(), gathered.view());
  EXPECT_OK(check_all_gather(&gather, shape_of(2, 3, 360), &call));
  EXPECT_EQ(call.bytes, 120);
  EXPECT_EQ(call.stride, 0);
  EXPECT_FALSE(call.stays_in_buffer);
  EXPECT_FALSE(call.lockstep);
  const ab_exchange_all_to_all_args regions = regions_args(x.view(), exchanged.view());
  EXPECT_OK(check_all_to_all(&regions, shape_of(0, 3, 120), &call));
  EXPECT_EQ(call.bytes, 40);
  EXPECT_EQ(call.stride, 40);
  EXPECT_TRUE(call.lockstep);
  const ab_exchange_all_gather_args stays = gather_args(x.view(), nullptr);
  EXPECT_OK(check_all_gather(&stays, shape_of(2, 3, 360), &call));
  EXPECT_TRUE(call.stays_in_buffer);
  const Tensor<uint8_t> empty({0, 5}, AB_FLOAT8_E4M3);
  const ab_exchange_all_gather_args nothing = gather_args(empty.view(), empty.view());
  EXPECT_OK(check_all_gather(&nothing, shape_of(0, 3, 0), &call));
  EXPECT_EQ(call.bytes, 0);
}

// Ranks choose by arguments that are the same on all of them.
TEST(ExchangeCalls, SmallBlocksWithAnOutputAreMovedByOneKernel) {
  const int64_t most = kSmallBytes;
  const Shape shape = shape_of(0, 2, 2 * most + 2);
  const auto operation_for = [&](int64_t bytes, bool has_out, int32_t lockstep, int32_t part) {
    char memory = 0;
    const ab_tensor x{&memory, AB_UINT8, 2, {bytes, 1}, nullptr};
    const ab_tensor out{&memory, AB_UINT8, 2, {2 * bytes, 1}, nullptr};
    const ab_tensor* const to = has_out ? &out : nullptr;
    const ab_exchange_all_gather_args args{sizeof(args), nullptr, 1,       lockstep, part,    0,
                                           &x,           to,      nullptr, nullptr,  nullptr, nullptr};
    Call call;
    EXPECT_OK(check_all_gather(&args, shape, &call));
    EXPECT_EQ(call.is_small(), call.operation == Operation::small_all_gather);
    return call.operation;
  };
  EXPECT_EQ(operation_for(0, true, 0, AB_EXCHANGE_WHOLE), Operation::small_all_gather);
  EXPECT_EQ(operation_for(most, true, 0, AB_EXCHANGE_WHOLE), Operation::small_all_gather);
  EXPECT_EQ(operation_for(most + 1, true, 0, AB_EXCHANGE_WHOLE), Operation::all_gather);
  EXPECT_EQ(operation_for(most, false, 0, AB_EXCHANGE_WHOLE), Operation::all_gather);
  EXPECT_EQ(operation_for(most, true, 1, AB_EXCHANGE_WHOLE), Operation::all_gather);
  EXPECT_EQ(operation_for(most, true, 0, AB_EXCHANGE_START), Operation::all_gather);
  EXPECT_EQ(operation_for(most, true, 0, AB_EXCHANGE_FINISH), Operation::all_gather);
  // The block of an all-to-all, not its x, is compared.
  char memory = 0;
  const ab_tensor x{&memory, AB_UINT8, 2, {2 * most, 1}, nullptr};
  const ab_exchange_all_to_all_args args{sizeof(args), nullptr, 1, 0, AB_EXCHANGE_WHOLE, 0, &x, &x};
  Call call;
  EXPECT_OK(check_all_to_all(&args, shape, &call));
  EXPECT_EQ(call.operation, Operation::small_all_to_all);
}

TEST(ExchangeCalls, NameTheBadArgument) {
  const Tensor<float> x({6, 5});
  const Tensor<float> wrong({12, 5});
  const Tensor<int32_t> integers({18, 5});
  const Tensor<float> flat({30});
  const Tensor<uint8_t> truths({6, 5}, AB_BOOL);
  const Shape shape = shape_of(0, 3, 360);
  Call call;
  const auto gather = [&](const ab_tensor* x, const ab_tensor* out, int32_t buffer = 1, int32_t lockstep = 0) {
    ab_exchange_all_gather_args args = gather_args(x, out);
    args.buffer = buffer;
    args.lockstep = lockstep;
    return check_all_gather(&args, shape, &call);
  };
  EXPECT_REFUSED(gather(nullptr, nullptr), AB_INVALID_ARGUMENT, "x: got NULL");
  EXPECT_REFUSED(gather(flat.view(), nullptr), AB_INVALID_ARGUMENT, "x: got float32 (8) [30]");
  EXPECT_REFUSED(gather(truths.view(), nullptr), AB_INVALID_ARGUMENT, "x: got bool");
  EXPECT_REFUSED(gather(x.view(), wrong.view()), AB_INVALID_ARGUMENT, "out: got float32 (8) [12, 5]");
  EXPECT_REFUSED(gather(x.view(), integers.view()), AB_INVALID_ARGUMENT, "out: got int32 (4) [18, 5]");
  EXPECT_REFUSED(gather(x.view(), nullptr, 4), AB_INVALID_ARGUMENT, "buffer: got 4, expected an integer in [0, 4)");
  EXPECT_REFUSED(gather(x.view(), nullptr, -1), AB_INVALID_ARGUMENT, "buffer: got -1");
  EXPECT_REFUSED(gather(x.view(), nullptr, 1, 2), AB_INVALID_ARGUMENT, "lockstep: got 2, expected 0 or 1");
  ab_exchange_all_gather_args other = gather_args(x.view(), nullptr);
  other.part = 3;
  EXPECT_REFUSED(check_all_gather(&other, shape, &call), AB_INVALID_ARGUMENT, "part: got 3");
  other.part = 0;
  other.reserved = 1;
  EXPECT_REFUSED(check_all_gather(&other, shape, &call), AB_INVALID_ARGUMENT, "reserved: got 1");
  EXPECT_REFUSED(gather(x.view(), nullptr, 0), AB_INVALID_ARGUMENT,
                 "x: got 3 blocks of 120 bytes, expected at most the 0 bytes of buffer 0");
  ab_exchange_all_to_all_args regions = regions_args(x.view(), nullptr);
  EXPECT_REFUSED(check_all_to_all(&regions, shape_of(0, 4, 360), &call), AB_INVALID_ARGUMENT,
                 "x: got 6 rows, expected a multiple of the ranks P=4");
  regions.out = wrong.view();
  EXPECT_REFUSED(check_all_to_all(&regions, shape, &call), AB_INVALID_ARGUMENT, "out: got float32 (8) [12, 5]");
}

TEST(ExchangeCalls, SumsNameTheBadArgument) {
  const Tensor<float> sums({6, 5});
  const Tensor<float> out({2, 5});
  const Tensor<int32_t> integers({2, 5});
  const Shape shape = shape_of(0, 3, 360);
  const auto sum = [&](const ab_tensor* x, const ab_tensor* addend, const ab_tensor* to, float factor = 1,
                       int32_t buffer = 1) {
    const ab_exchange_sum_args args{sizeof(args), nullptr, buffer, factor, x, addend, to};
    return check_sum(&args, shape);
  };
  EXPECT_OK(sum(sums.view(), nullptr, out.view()));
  EXPECT_OK(sum(sums.view(), out.view(), out.view(), -2));
  EXPECT_REFUSED(sum(sums.view(), nullptr, out.view(), INFINITY), AB_INVALID_ARGUMENT, "factor: got inf");
  EXPECT_REFUSED(sum(sums.view(), nullptr, out.view(), 1, 4), AB_INVALID_ARGUMENT, "buffer: got 4");
  EXPECT_REFUSED(sum(out.view(), nullptr, out.view()), AB_INVALID_ARGUMENT, "sums: got float32 (8) [2, 5]");
  EXPECT_REFUSED(sum(sums.view(), sums.view(), out.view()), AB_INVALID_ARGUMENT, "addend: got float32 (8) [6, 5]");
  EXPECT_REFUSED(sum(sums.view(), nullptr, integers.view()), AB_INVALID_ARGUMENT, "out: got int32 (4) [2, 5]");
  EXPECT_REFUSED(sum(nullptr, nullptr, out.view()), AB_INVALID_ARGUMENT, "sums: got NULL");
}

// A column belongs to one chunk, and chunks are whole tiles.
TEST(ExchangeChunks, CoverAllColumns) {
  for (const int64_t ranks : {1, 2, 4, 16}) {
    for (const int64_t T : {0, 1, 2048, 65536}) {
      for (const int64_t D : {1, 64, 256, 1000, 2048, 2880, 7168}) {
        const int64_t columns = return_columns(ranks, T, D, 2);
        EXPECT_GT(columns, 0);
        EXPECT_TRUE(columns == D || columns % 256 == 0);
        EXPECT_LE((D + columns - 1) / columns, 4);
      }
    }
  }
  EXPECT_EQ(return_columns(4, 8192, 2048, 2), 768);
  EXPECT_EQ(return_columns(4, 32768, 2048, 2), 512);
  EXPECT_EQ(return_columns(2, 8192, 2048, 2), 1024);
  EXPECT_EQ(return_columns(2, 512, 2048, 2), 2048);
}

TEST(ExchangeStatus, NamesTheRankAndTheStep) {
  constexpr uint64_t kLimit = 2'500'000'000;
  EXPECT_OK(status_of({}, kLimit));
  const auto status = [&](FailureKind kind, Word seen = 0, Word expected = 0) {
    return status_of({pack({kind, 2, 1, 3, 0, 17}), seen, expected}, kLimit);
  };
  EXPECT_REFUSED(status(FailureKind::not_arrived), AB_INTERNAL,
                 "exchange: the block of rank 2 did not arrive within 2.5 s (use 17 of buffer 0, phase 3, noticed by "
                 "rank 1)");
  EXPECT_REFUSED(status(FailureKind::not_released), AB_INTERNAL, "rank 2 did not connect or release its buffer");
  EXPECT_REFUSED(status(FailureKind::unreleased), AB_INTERNAL, "rank 2 used its buffer again before");
  EXPECT_REFUSED(status(FailureKind::other_call), AB_INTERNAL, "rank 2 made another call than rank 1");
  EXPECT_REFUSED(
      status(FailureKind::other_call, make_use(17, Operation::all_to_all, 8), make_use(17, Operation::all_gather, 16)),
      AB_INTERNAL, "got all_to_all of 8 bytes, expected all_gather of 16 bytes");
  EXPECT_REFUSED(status(FailureKind::other_call, make_use(17, Operation::returned_sums, 8),
                        make_use(17, Operation::all_to_all, 8)),
                 AB_INTERNAL, "got returned sums of 8 bytes, expected all_to_all of 8 bytes");
}

TEST(ExchangeCalls, BlocksHaveAMaximum) {
  EXPECT_OK(check_block_bytes("x", kMaxBlockBytes));
  EXPECT_REFUSED(check_block_bytes("out", kMaxBlockBytes + 1), AB_UNSUPPORTED, "out: got blocks of 68719476736 bytes");
  EXPECT_REFUSED(check_buffer(4, "returning_buffer"), AB_INVALID_ARGUMENT, "returning_buffer: got 4");
}

// The handles of a group, as bytes. Rank r is on device r.
class Handles {
 public:
  explicit Handles(int ranks) : bytes_(static_cast<size_t>(ranks) * AB_EXCHANGE_HANDLE_BYTES) {
    for (int r = 0; r < ranks; ++r) {
      Handle handle{};
      std::memcpy(handle.magic, kHandleMagic, sizeof(kHandleMagic));
      std::strcpy(handle.version, "0.2.0");
      handle.rank = r;
      handle.ranks = ranks;
      handle.buffer_bytes[0] = 4096;
      handle.id = static_cast<uint64_t>(r) + 1;
      handle.process[0] = static_cast<uint64_t>(r / 2);  // two ranks per process
      std::strcpy(handle.host, "red");
      std::strcpy(handle.boot, "5c0a");
      handle.device[0] = static_cast<unsigned char>(r);
      std::strcpy(handle.pci, "0000:1b:00.0");
      set(r, handle);
    }
  }
  Handle get(int r) const {
    Handle handle;
    std::memcpy(&handle, bytes_.data() + static_cast<size_t>(r) * AB_EXCHANGE_HANDLE_BYTES, sizeof(handle));
    return handle;
  }
  void set(int r, const Handle& handle) {
    std::memcpy(bytes_.data() + static_cast<size_t>(r) * AB_EXCHANGE_HANDLE_BYTES, &handle, sizeof(handle));
  }
  template <class Change>
  Handles with(int r, const Change& change) const {
    Handles changed = *this;
    Handle handle = get(r);
    change(&handle);
    changed.set(r, handle);
    return changed;
  }
  // Checks the handles for the rank that exported `own`.
  ab_status check(const Handle& own) const {
    Handle handles[kMaxRanks];
    return check_handles(bytes_.data(), bytes_.size(), own, handles);
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

TEST(ExchangeHandles, OfRanksOfOneHostAreAccepted) {
  for (const int ranks : {1, 2, 5, 16}) {
    const Handles handles(ranks);
    for (int r = 0; r < ranks; ++r) EXPECT_OK(handles.check(handles.get(r)));
  }
}

TEST(ExchangeHandles, OfAnotherSizeOrVersionAreRefused) {
  const Handles handles(4);
  const Handle own = handles.get(1);
  Handle all[kMaxRanks];
  EXPECT_REFUSED(check_handles(nullptr, 2048, own, all), AB_INVALID_ARGUMENT, "handles: got NULL");
  EXPECT_REFUSED(check_handles(handles.bytes().data(), 2047, own, all), AB_INVALID_ARGUMENT,
                 "handles: got 2047 bytes, expected 2048, 512 for each of 4 ranks");
  EXPECT_REFUSED(handles.with(2, [](Handle* h) { h->magic[0] = 0; }).check(own), AB_INVALID_ARGUMENT,
                 "handles[2]: got other bytes");
  EXPECT_REFUSED(handles.with(3, [](Handle* h) { std::strcpy(h->version, "0.1.0"); }).check(own), AB_UNSUPPORTED,
                 "handles[3]: got a rank with anabranch 0.1.0, expected 0.2.0 as on rank 1");
}

TEST(ExchangeHandles, OfOtherRanksOrSizesAreRefused) {
  const Handles handles(4);
  const Handle own = handles.get(1);
  EXPECT_REFUSED(handles.with(2, [](Handle* h) { h->ranks = 8; }).check(own), AB_INVALID_ARGUMENT,
                 "handles[2]: got an exchange of 8 ranks, expected 4");
  EXPECT_REFUSED(handles.with(2, [](Handle* h) { h->rank = 3; }).check(own), AB_INVALID_ARGUMENT,
                 "handles[2]: got the handle of rank 3, expected that of rank 2");
  EXPECT_REFUSED(handles.with(1, [](Handle* h) { h->id = 77; }).check(own), AB_INVALID_ARGUMENT,
                 "handles[1]: got the handle of another exchange");
  EXPECT_REFUSED(handles.with(0, [](Handle* h) { h->buffer_bytes[0] = 1; }).check(own), AB_INVALID_ARGUMENT,
                 "handles[0]: got 1 bytes in buffer 0, expected 4096 as on rank 1");
}

TEST(ExchangeHandles, OfOtherHostsOrOneDeviceAreUnsupported) {
  const Handles handles(4);
  const Handle own = handles.get(0);
  const auto move = [](Handle* h) {
    std::strcpy(h->boot, "77aa");
    std::strcpy(h->host, "blue");
  };
  EXPECT_REFUSED(handles.with(3, move).check(own), AB_UNSUPPORTED,
                 "exchange: rank 3 is on another host: got blue, expected red as rank 0");
  EXPECT_REFUSED(handles.with(2, [](Handle* h) { h->boot[0] = '\0'; }).check(own), AB_UNSUPPORTED,
                 "rank 2 is in another process, and a boot id");
  EXPECT_OK(handles.with(1, [](Handle* h) { h->boot[0] = '\0'; }).check(own));  // the same process
  EXPECT_REFUSED(handles.with(2, [](Handle* h) { h->device[0] = 1; }).check(own), AB_UNSUPPORTED,
                 "exchange: ranks 1 and 2 are on one device (0000:1b:00.0)");
}

}  // namespace
}  // namespace anabranch::exchange::testing
