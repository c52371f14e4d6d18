// Shared-memory layouts of the sm80 (mma.sync) kernels, tested without running kernels. Every chunk has its own
// address, warp accesses have no bank conflicts, and a float32 number is the sum of its TF32 parts.
#include "experts/portable/shared_tile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "core/cuda/mma.cuh"
#include "experts/portable/fragments.cuh"
#include "experts/portable/tile_choice.h"

namespace anabranch::cuda::portable {
namespace {

constexpr int kLanes = 32;

// Number of shared-memory wavefronts of accesses with `bytes` bytes per lane: one per 128 bytes without bank conflicts.
// Lanes that read the same word share one access.
int wavefronts_of(const std::vector<uint32_t>& addresses, int bytes) {
  const size_t together = static_cast<size_t>(128 / bytes);
  int wavefronts = 0;
  for (size_t first = 0; first < addresses.size(); first += together) {
    std::set<uint32_t> words[32];
    for (size_t i = first; i < std::min(first + together, addresses.size()); ++i) {
      for (uint32_t word = addresses[i] / 4; word < (addresses[i] + static_cast<uint32_t>(bytes)) / 4; ++word) {
        words[word % 32].insert(word);
      }
    }
    size_t max_words = 0;
    for (const auto& bank : words) max_words = std::max(max_words, bank.size());
    wavefronts += static_cast<int>(max_words);
  }
  return wavefronts;
}
template <class Address>
int wavefronts_of_warp(int bytes, const Address& address) {
  std::vector<uint32_t> addresses;
  for (int lane = 0; lane < kLanes; ++lane) addresses.push_back(address(lane));
  return wavefronts_of(addresses, bytes);
}

template <Major kMajor, int kElementBytes, int kSides, int kThreads>
struct Kind {
  static constexpr int threads = kThreads;
  static constexpr Major major = kMajor;
  static constexpr int bytes = kElementBytes;
  static constexpr int sides = kSides;
  using Tile = SharedTile<kMajor, kElementBytes, kSides>;
};

template <class T>
class SharedTiles : public ::testing::Test {};
using Kinds = ::testing::Types<Kind<Major::k, 2, 128, 256>, Kind<Major::k, 2, 128, 128>, Kind<Major::k, 2, 32, 128>,
                               Kind<Major::k, 4, 128, 256>, Kind<Major::k, 4, 128, 128>, Kind<Major::k, 4, 64, 128>,
                               Kind<Major::k, 4, 32, 128>, Kind<Major::mn, 2, 128, 256>, Kind<Major::mn, 2, 128, 128>,
                               Kind<Major::mn, 4, 128, 256>, Kind<Major::mn, 4, 128, 128>, Kind<Major::mn, 4, 64, 128>>;
TYPED_TEST_SUITE(SharedTiles, Kinds);

TYPED_TEST(SharedTiles, EveryChunkIsCopiedOnceToItsOwnAddress) {
  using Tile = typename TypeParam::Tile;
  using Plan = CopyPlan<Tile, TypeParam::threads>;
  std::set<std::pair<int, int>> chunks;
  std::set<uint32_t> places;
  for (int thread = 0; thread < TypeParam::threads; ++thread) {
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      const int row = Plan::row(thread, pass);
      const int chunk = Plan::chunk(thread, pass);
      ASSERT_LT(row, Tile::kRows);
      EXPECT_TRUE(chunks.insert({row, chunk}).second);
      const uint32_t place = Tile::chunk(row, chunk);
      EXPECT_EQ(place % kChunkBytes, 0u);
      EXPECT_LT(place, static_cast<uint32_t>(TypeParam::sides * kDepthBytes));
      EXPECT_TRUE(places.insert(place).second);
    }
  }
  EXPECT_EQ(chunks.size(), static_cast<size_t>(TypeParam::sides * kDepthBytes / kChunkBytes));
}

TYPED_TEST(SharedTiles, CopiesHaveNoBankConflicts) {
  using Tile = typename TypeParam::Tile;
  using Plan = CopyPlan<Tile, TypeParam::threads>;
  for (int warp = 0; warp < TypeParam::threads / kLanes; ++warp) {
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      const int wavefronts = wavefronts_of_warp(kChunkBytes, [&](int lane) {
        const int thread = warp * kLanes + lane;
        return Tile::chunk(Plan::row(thread, pass), Plan::chunk(thread, pass));
      });
      EXPECT_EQ(wavefronts, 4);
    }
  }
}

TYPED_TEST(SharedTiles, FragmentsHaveNoBankConflicts) {
  using Tile = typename TypeParam::Tile;
  for (int step = 0; step < kSteps; ++step) {
    for (int side = 0; side < TypeParam::sides; side += kFragmentRows) {
      if constexpr (kByFours<TypeParam::major, TypeParam::bytes>) {
        EXPECT_EQ(wavefronts_of_warp(kChunkBytes,
                                     [&](int lane) {
                                       const MatrixPlace place = place_of_fours(lane, side / 32 * 32, step);
                                       return Tile::chunk(place.row, place.chunk);
                                     }),
                  4);
      } else {
        for (const auto place_of : TypeParam::major == Major::k ? std::vector{place_of_a_by_k, place_of_b_by_k}
                                                                : std::vector{place_of_a_by_mn, place_of_b_by_mn}) {
          EXPECT_EQ(wavefronts_of_warp(kChunkBytes,
                                       [&](int lane) {
                                         const MatrixPlace place = place_of(lane, side, step);
                                         return Tile::chunk(place.row, place.chunk);
                                       }),
                    4);
        }
      }
    }
  }
}

// Pieces and their chunks belong to one thread each, and warps access them without bank conflicts.
template <Major kMajor, int kElements>
void check_packed_plan() {
  using Tile = SharedTile<kMajor, 2, kTileColumns>;
  using Plan = PackedPlan<Tile, kElements, 128>;
  std::set<uint32_t> places;
  for (int warp = 0; warp < 4; ++warp) {
    for (int i = 0; i < Plan::kPieces; ++i) {
      for (int j = 0; j < Plan::kChunks; ++j) {
        const int wavefronts = wavefronts_of_warp(kChunkBytes, [&](int lane) {
          const int thread = warp * kLanes + lane;
          const uint32_t first = Tile::chunk(Plan::row(thread, i), Plan::piece(thread, i) * Plan::kChunks);
          const uint32_t place = Tile::chunk(Plan::row(thread, i), Plan::piece(thread, i) * Plan::kChunks + j);
          EXPECT_EQ(place, first ^ static_cast<uint32_t>(j * kChunkBytes));
          EXPECT_TRUE(places.insert(place).second);
          return place;
        });
        EXPECT_EQ(wavefronts, 4);
      }
    }
  }
  EXPECT_EQ(places.size(), static_cast<size_t>(kTileColumns * kDepthBytes / kChunkBytes));
}

TEST(PackedPlans, CoverABlockWithoutConflicts) {
  check_packed_plan<Major::k, 32>();
  check_packed_plan<Major::k, 16>();
  check_packed_plan<Major::mn, 32>();
  check_packed_plan<Major::mn, 16>();
}

// Fragments read in groups of four words: each lane reads the words of its own rows or columns.
TEST(Fours, BelongToTheLanesRows) {
  using Tile = SharedTile<Major::mn, 4, 128>;
  const auto element = [](int k, int side) { return Tile::chunk(k, side / 4) + static_cast<uint32_t>(side % 4 * 4); };
  for (int first = 0; first < 128; first += 64) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int step = 0; step < kSteps; ++step) {
        for (int n = 0; n < 8; ++n) {
          for (int word = 0; word < 2; ++word) {
            const MatrixPlace at = place_of_fours(lane, first, 0);
            const auto steps = static_cast<uint32_t>((step * 8 + word * 4) * 128 * 4);
            EXPECT_EQ(Tile::chunk(at.row, at.chunk) + static_cast<uint32_t>(n / 4 * kFoursBytes + n % 4 * 4) + steps,
                      element(step * 8 + lane % 4 + word * 4, first + side_at<true>(n, lane / 4)));
          }
        }
      }
    }
  }
}

template <class Shape, bool kFoursA>
void check_staging() {
  using Places = Staging<Shape, kFoursA, false>;
  std::set<int> rows;
  for (int part = 0; part < Shape::kFragmentsDown; ++part) {
    for (int row = 0; row < kStagedRows<Shape>; ++row) EXPECT_TRUE(rows.insert(Places::row_of_tile(row, part)).second);
  }
  EXPECT_EQ(rows.size(), static_cast<size_t>(Shape::kRows));
  EXPECT_EQ(*rows.rbegin(), Shape::kRows - 1);
}

TEST(StagedTiles, EveryRowIsStagedOnce) {
  check_staging<LargeTile, false>();
  check_staging<LargeTile, true>();
  check_staging<SplitTile, false>();
  check_staging<SplitTile, true>();
  check_staging<SmallTile, false>();
}

TEST(StagedTiles, AccumulatorsHaveNoBankConflicts) {
  using Pairs = Staging<LargeTile, false, false>;
  using Fours = Staging<LargeTile, false, true>;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(
        wavefronts_of_warp(
            16, [&](int lane) { return Fours::place(row_of_c(lane, i), side_at<true>(0, column_of_c(lane, i))); }),
        4);
    if (i % 2 != 0) continue;
    EXPECT_EQ(wavefronts_of_warp(8, [&](int lane) { return Pairs::place(row_of_c(lane, i), column_of_c(lane, i)); }),
              2);
  }
  // Each lane writes 4 contiguous elements of a row.
  EXPECT_EQ(wavefronts_of_warp(16, [](int lane) { return Pairs::place(1, lane * 4); }), 4);
  EXPECT_EQ(wavefronts_of_warp(16, [](int lane) { return Fours::place(1, lane * 4); }), 4);
}

// The error is at most one unit in the 24th bit of the larger part.
TEST(Split, PartsAreTf32AndTheirSumIsTheNumber) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const uint32_t exponent = 1 + 24 + random() % (254 - 24);  // both parts are normal numbers
    const uint32_t bits = (random() & 0x807fffffu) | exponent << 23;
    if ((bits & 0x7fffffffu) > 0x7f7fefffu) continue;  // rounds to infinity
    const Split parts = split(bits);
    ASSERT_EQ(parts.high & 0x1fffu, 0u);
    const double value = float_from_bits(bits);
    const double sum = static_cast<double>(float_from_bits(parts.high)) + float_from_bits(parts.low & kTf32);
    ASSERT_LE(std::abs(sum - value), std::ldexp(1.0, static_cast<int>(exponent) - 127 - 23)) << value;
  }
  for (const float exact : {0.0f, -0.0f, 1.0f, -2.5f, 0x1.ffcp+3f}) {
    EXPECT_EQ(float_from_bits(split(bits_of(exact)).high), exact);
    EXPECT_EQ(float_from_bits(split(bits_of(exact)).low), 0.0f);
  }
  // NaN of any sign and payload stays NaN. In the last two, which GPUs write, rounding carries through all bits.
  for (const uint32_t nan : {0x7fc00000u, 0x7f802000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(float_from_bits(split(nan).low & kTf32))) << nan;
  }
}

// Rounding to TF32 has an error of at most two thirds of a unit in the last place, and keeps TF32 numbers
// unchanged.
TEST(Tf32, RoundsToANearbyNumber) {
  std::mt19937 random(2);
  double sum = 0;
  for (int i = 0; i < 1000000; ++i) {
    const uint32_t bits = (random() & 0x807fffffu) | (1 + random() % 253) << 23;
    const double value = float_from_bits(bits);
    const double error = (float_from_bits(rounded_to_tf32(bits) & kTf32) - value) / value;
    ASSERT_LE(std::abs(error), 0x1p-10 * 2 / 3 * (1 + 0x1p-10)) << value;
    sum += error;
    ASSERT_EQ(rounded_to_tf32(bits & kTf32) & kTf32, bits & kTf32);
  }
  EXPECT_LT(std::abs(sum), 1e6 * 0x1p-10 / 30);  // nearly unbiased
  for (const uint32_t other : {0u, 0x80000000u, 0x7f800000u, 0xff800000u}) {
    EXPECT_EQ(rounded_to_tf32(other) & kTf32, other);
  }
  for (const uint32_t nan : {0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(float_from_bits(rounded_to_tf32(nan) & kTf32))) << nan;
  }
}

TEST(TileChoices, FewRowsPerGroupUseSmallTiles) {
  const auto choose = [](int64_t R, int64_t E, int bytes, Precision precision) {
    return choose_tile(R, E, 2048, 132, bytes, precision);
  };
  for (const Precision precision : {Precision::highest, Precision::tf32}) {
    for (const int bytes : {2, 4}) {
      const int64_t split = splits(static_cast<size_t>(bytes), precision) ? 2 : 1;  // favours small tiles
      EXPECT_EQ(choose(8, 128, bytes, precision), TileChoice::small);
      EXPECT_EQ(choose(128 * 16, 128, bytes, precision), TileChoice::small);
      EXPECT_EQ(choose(split * 128 * 256, 128, bytes, precision), TileChoice::main);
      EXPECT_EQ(choose(262144, 128, bytes, precision), TileChoice::main);
      EXPECT_EQ(choose(262144, 8, bytes, precision), TileChoice::main);
    }
  }
}

// Thresholds measured on one H100.
TEST(TileChoices, FewTilesUseSmallTiles) {
  for (const Precision precision : {Precision::highest, Precision::tf32}) {
    EXPECT_EQ(choose_tile(512, 1, 2048, 132, 4, precision), TileChoice::small);
    EXPECT_EQ(choose_tile(1024, 1, 2048, 132, 4, precision), TileChoice::main);
  }
}

}  // namespace
}  // namespace anabranch::cuda::portable
