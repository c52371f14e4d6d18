// Exact top-k by sorting networks, one token per lane.
//
// Candidates are float64, the keys of score.h, which are positive and distinct, with 0 for "none"; or float32, for
// which only the order matters. A list has `length` vectors; each lane is sorted, largest first. Candidates stream
// through a list that holds the top `length` of each lane: sort a chunk, compute max(list[i], chunk[length-1-i]), which
// is bitonic, and sort the result. Internal linkage: *.isa.cc files include this header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace anabranch {
namespace {

// The number of tokens that are processed together, one per lane of a float32 vector. A float64 vector holds all of
// them or half.
#if defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__)
constexpr int kDoubles = kLanes;
#else
constexpr int kDoubles = kLanes / 2;
#endif

using LaneFloats [[gnu::vector_size(kLanes * sizeof(float))]] = float;
using LaneDoubles [[gnu::vector_size(kDoubles * sizeof(double))]] = double;

[[gnu::always_inline]] inline LaneFloats load_lanes(const float* p) {
  LaneFloats v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
[[gnu::always_inline]] inline void store_lanes(float* p, LaneFloats v) { __builtin_memcpy(p, &v, sizeof(v)); }

// A vector of candidates of type T, and its number of lanes.
template <class T>
struct LaneVector {
  using Vector = LaneFloats;
};
template <>
struct LaneVector<double> {
  using Vector = LaneDoubles;
};
template <class T>
using Candidates = typename LaneVector<T>::Vector;
template <class T>
constexpr int kWidth = static_cast<int>(sizeof(Candidates<T>) / sizeof(T));

// Moves the larger value to `high` and the smaller to `low`.
template <class Vector>
[[gnu::always_inline]] inline void exchange(Vector& high, Vector& low) {
  const Vector a = high;
  const Vector b = low;
  high = a > b ? a : b;
  low = a < b ? a : b;
}

template <class Vector>
[[gnu::always_inline]] inline Vector larger(Vector a, Vector b) {
  return a > b ? a : b;
}

// Batcher's odd-even merge sort of n = 2^m elements: calls exchange(i, j) for every comparator, i < j.
template <class Exchange>
[[gnu::always_inline]] constexpr void sort_network(int n, const Exchange& exchange) {
  for (int p = 1; p < n; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int j = k % p; j + k < n; j += 2 * k) {
        for (int i = j; i < j + k && i + k < n; ++i) {
          if (i / (2 * p) == (i + k) / (2 * p)) exchange(i, i + k);
        }
      }
    }
  }
}

// Sorts a bitonic sequence of n = 2^m elements.
template <class Exchange>
[[gnu::always_inline]] constexpr void bitonic_network(int n, const Exchange& exchange) {
  for (int k = n / 2; k >= 1; k /= 2) {
    for (int j = 0; j < n; j += 2 * k) {
      for (int i = j; i < j + k; ++i) exchange(i, i + k);
    }
  }
}

// The exchanges of a network as a table, so that they unroll over registers.
template <int kSize>
struct Network {
  struct Pair {
    int high, low;
  };
  Pair pairs[kSize * kSize] = {};
  int count = 0;
  constexpr void operator()(int i, int j) { pairs[count++] = {i, j}; }
};

template <int kSize, bool kBitonic>
constexpr Network<kSize> make_network() {
  Network<kSize> network;
  const auto add = [&](int i, int j) { network(i, j); };
  kBitonic ? bitonic_network(kSize, add) : sort_network(kSize, add);
  return network;
}

template <bool kBitonic, class Vector, int kSize>
[[gnu::always_inline]] inline void apply_network(Vector (&list)[kSize]) {
  static constexpr Network<kSize> kNetwork = make_network<kSize, kBitonic>();
  [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
    (exchange(list[kNetwork.pairs[I].high], list[kNetwork.pairs[I].low]), ...);
  }(std::make_index_sequence<static_cast<size_t>(kNetwork.count)>());
}

template <class T>
[[gnu::always_inline]] inline Candidates<T> load(const T* p) {
  Candidates<T> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
[[gnu::always_inline]] inline void store(T* p, Candidates<T> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <int kLength, class T>
[[gnu::always_inline]] inline void load_list(const T* p, Candidates<T> (&list)[kLength]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLength; ++i) list[i] = load(p + i * kWidth<T>);
}
template <int kLength, class T>
[[gnu::always_inline]] inline void store_list(T* p, const Candidates<T> (&list)[kLength]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLength; ++i) store(p + i * kWidth<T>, list[i]);
}

// list = the top kLength of each lane of `vectors` vectors, a multiple of kLength.
template <int kLength, class T>
inline void lane_topk(const T* candidates, int64_t vectors, T* list) {
  Candidates<T> top[kLength];
  load_list(candidates, top);
  apply_network<false>(top);
  for (int64_t first = kLength; first < vectors; first += kLength) {
    Candidates<T> chunk[kLength];
    load_list(candidates + first * kWidth<T>, chunk);
    apply_network<false>(chunk);
#pragma GCC unroll 16
    for (int i = 0; i < kLength; ++i) top[i] = larger(top[i], chunk[kLength - 1 - i]);
    apply_network<true>(top);
  }
  store_list(list, top);
}

// Lists of up to kBlock vectors stay in registers. Longer lists are sorted in memory, in blocks of kBlock in registers.
constexpr int kBlock = 16;

template <bool kBitonic, class T>
[[gnu::noinline]] void sort_block(T* memory) {
  Candidates<T> block[kBlock];
  load_list(memory, block);
  apply_network<kBitonic>(block);
  store_list(memory, block);
}

template <class T>
inline void exchange_in_memory(T* high, T* low) {
  Candidates<T> a = load(high);
  Candidates<T> b = load(low);
  exchange(a, b);
  store(high, a);
  store(low, b);
}

// Sorts a bitonic sequence of `length` vectors.
template <class T>
inline void sort_bitonic(T* memory, int length) {
  constexpr int W = kWidth<T>;
  for (int half = length / 2; half >= kBlock; half /= 2) {
    for (int begin = 0; begin < length; begin += 2 * half) {
      for (int i = begin; i < begin + half; ++i) exchange_in_memory(memory + i * W, memory + (i + half) * W);
    }
  }
  for (int begin = 0; begin < length; begin += kBlock) sort_block<true>(memory + begin * W);
}

// Merges two sorted halves: exchanging element i with element i from the end of the other half moves the larger ones to
// the upper half.
template <class T>
inline void merge_halves(T* memory, int length) {
  constexpr int W = kWidth<T>;
  for (int i = 0; i < length / 2; ++i) exchange_in_memory(memory + i * W, memory + (length - 1 - i) * W);
  sort_bitonic(memory, length / 2);
  sort_bitonic(memory + length / 2 * W, length / 2);
}

// The last chunk may be shorter (whole_chunks).
template <class T>
inline void long_lane_topk(int length, const T* candidates, int64_t vectors, T* list, T* chunk) {
  constexpr int W = kWidth<T>;
  for (int64_t first = 0; first < vectors; first += length) {
    const int n = vectors - first < length ? static_cast<int>(vectors - first) : length;
    T* to = first == 0 ? list : chunk;
    __builtin_memcpy(to, candidates + first * W, static_cast<size_t>(n) * W * sizeof(T));
    for (int begin = 0; begin < n; begin += kBlock) sort_block<false>(to + begin * W);
    for (int size = 2 * kBlock; size <= n; size *= 2) {
      for (int begin = 0; begin < n; begin += size) merge_halves(to + begin * W, size);
    }
    if (first == 0) continue;
    T* const last = list + (length - n) * W;
    for (int i = 0; i < n; ++i) store(last + i * W, larger(load(last + i * W), load(chunk + (n - 1 - i) * W)));
    sort_bitonic(list, length);
  }
}

// The number of vectors after padding `count` candidates for a list: whole chunks of its length. The last chunk may be
// a smaller power of two, at least kBlock, unless it is the only one.
inline int64_t whole_chunks(int64_t count, int length) {
  const int64_t remainder = count & (length - 1);  // length is a power of two
  if (remainder == 0 && count > 0) return count;
  int64_t last = count < length || length < kBlock ? length : kBlock;
  while (last < remainder) last *= 2;
  return count - remainder + last;
}

// The length of a list that holds the top k.
inline int list_length(int64_t k) {
  int length = 1;
  while (length < k) length *= 2;
  return length;
}

// list[length][kWidth] = the top `length` of each lane of `vectors` vectors of candidates (whole_chunks). chunk is
// scratch memory of the size of the list.
template <class T>
inline void lane_topk(int length, const T* candidates, int64_t vectors, T* list, T* chunk) {
  switch (length) {
    case 1: return lane_topk<1>(candidates, vectors, list);
    case 2: return lane_topk<2>(candidates, vectors, list);
    case 4: return lane_topk<4>(candidates, vectors, list);
    case 8: return lane_topk<8>(candidates, vectors, list);
    case 16: return lane_topk<16>(candidates, vectors, list);
    default: return long_lane_topk(length, candidates, vectors, list, chunk);
  }
}

// Transposes rows and lanes: one step per bit of the lane index.
template <int kBit, class Vector, size_t... Lane>
[[gnu::always_inline]] inline void swap_bit(Vector& a, Vector& b, std::index_sequence<Lane...>) {
  constexpr size_t kSize = sizeof...(Lane);
  constexpr size_t kOther = size_t{1} << kBit;
  const Vector even = __builtin_shufflevector(a, b, (Lane & kOther ? kSize + (Lane ^ kOther) : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & kOther ? kSize + Lane : Lane ^ kOther)...);
  a = even;
}
template <int kBit = 0, class Vector, int kSize>
[[gnu::always_inline]] inline void transpose(Vector (&rows)[kSize]) {
  if constexpr ((1 << kBit) < kSize) {
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) {
      if ((i >> kBit & 1) == 0) {
        swap_bit<kBit>(rows[i], rows[i + (1 << kBit)], std::make_index_sequence<static_cast<size_t>(kSize)>());
      }
    }
    transpose<kBit + 1>(rows);
  }
}

// out[i][lane] = rows[lane][first + i] for i < count; there are kWidth rows.
template <class T>
inline void transpose_rows(const T* const* rows, int64_t first, int64_t count, T* out) {
  constexpr int W = kWidth<T>;
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    Candidates<T> block[W];
#pragma GCC unroll 16
    for (int lane = 0; lane < W; ++lane) block[lane] = load(rows[lane] + first + i);
    transpose(block);
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store(out + (i + j) * W, block[j]);
  }
  for (; i < count; ++i) {
    for (int lane = 0; lane < W; ++lane) out[i * W + lane] = rows[lane][first + i];
  }
}

}  // namespace
}  // namespace anabranch
