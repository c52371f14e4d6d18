// Exact top-k by sorting networks, a token a lane.
//
// Candidates are float64 numbers: the keys of score.h, positive and no two alike, with 0 for "none", or plain numbers
// whose order alone matters. A list holds `length` vectors; read down one lane it is sorted, largest first. Candidates
// stream through the lanes of a list of the top `length` of each lane: sort a chunk, keep max(list[i],
// chunk[length-1-i]), which is bitonic, and sort that again. Internal linkage: included by *.isa.cc files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace anabranch {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 8;
#elif defined(__AVX__)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 2;
#endif

using Candidates [[gnu::vector_size(kLanes * sizeof(double))]] = double;
using LaneFloats [[gnu::vector_size(kLanes * sizeof(float))]] = float;

[[gnu::always_inline]] inline LaneFloats load_lanes(const float* p) {
  LaneFloats v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
[[gnu::always_inline]] inline void store_lanes(float* p, LaneFloats v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Larger to `high`, smaller to `low`.
[[gnu::always_inline]] inline void exchange(Candidates& high, Candidates& low) {
  const Candidates a = high;
  const Candidates b = low;
  high = a > b ? a : b;
  low = a < b ? a : b;
}

[[gnu::always_inline]] inline Candidates larger(Candidates a, Candidates b) { return a > b ? a : b; }

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

// A network of known size as a table, so that its exchanges unroll over registers.
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

template <int kSize, bool kBitonic>
[[gnu::always_inline]] inline void apply_network(Candidates (&list)[kSize]) {
  static constexpr Network<kSize> kNetwork = make_network<kSize, kBitonic>();
  [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
    (exchange(list[kNetwork.pairs[I].high], list[kNetwork.pairs[I].low]), ...);
  }(std::make_index_sequence<static_cast<size_t>(kNetwork.count)>());
}

[[gnu::always_inline]] inline Candidates load(const double* p) {
  Candidates v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
[[gnu::always_inline]] inline void store(double* p, Candidates v) { __builtin_memcpy(p, &v, sizeof(v)); }

template <int kLength>
[[gnu::always_inline]] inline void load_list(const double* p, Candidates (&list)[kLength]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLength; ++i) list[i] = load(p + i * kLanes);
}
template <int kLength>
[[gnu::always_inline]] inline void store_list(double* p, const Candidates (&list)[kLength]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLength; ++i) store(p + i * kLanes, list[i]);
}

// list = the top kLength of each lane of `vectors` vectors, a multiple of kLength.
template <int kLength>
inline void top_of_lanes(const double* candidates, int64_t vectors, double* list) {
  Candidates top[kLength];
  load_list(candidates, top);
  apply_network<kLength, false>(top);
  for (int64_t first = kLength; first < vectors; first += kLength) {
    Candidates chunk[kLength];
    load_list(candidates + first * kLanes, chunk);
    apply_network<kLength, false>(chunk);
#pragma GCC unroll 16
    for (int i = 0; i < kLength; ++i) top[i] = larger(top[i], chunk[kLength - 1 - i]);
    apply_network<kLength, true>(top);
  }
  store_list(list, top);
}

// Lists up to kBlock are kept in registers, longer ones are sorted in memory, blocks of kBlock in registers.
constexpr int kBlock = 16;

template <bool kBitonic>
[[gnu::noinline]] void sort_block(double* memory) {
  Candidates block[kBlock];
  load_list(memory, block);
  apply_network<kBlock, kBitonic>(block);
  store_list(memory, block);
}

inline void exchange_in_memory(double* high, double* low) {
  Candidates a = load(high);
  Candidates b = load(low);
  exchange(a, b);
  store(high, a);
  store(low, b);
}

// Sorts a bitonic sequence of `length` vectors.
inline void sort_bitonic(double* memory, int length) {
  for (int half = length / 2; half >= kBlock; half /= 2) {
    for (int begin = 0; begin < length; begin += 2 * half) {
      for (int i = begin; i < begin + half; ++i) exchange_in_memory(memory + i * kLanes, memory + (i + half) * kLanes);
    }
  }
  for (int begin = 0; begin < length; begin += kBlock) sort_block<true>(memory + begin * kLanes);
}

// Merges two sorted halves: the larger of half[i] and the other half's i-th from its end are the upper half.
inline void merge_halves(double* memory, int length) {
  for (int i = 0; i < length / 2; ++i) exchange_in_memory(memory + i * kLanes, memory + (length - 1 - i) * kLanes);
  sort_bitonic(memory, length / 2);
  sort_bitonic(memory + length / 2 * kLanes, length / 2);
}

inline void top_of_lanes_long(int length, const double* candidates, int64_t vectors, double* list, double* chunk) {
  for (int64_t first = 0; first < vectors; first += length) {
    double* to = first == 0 ? list : chunk;
    __builtin_memcpy(to, candidates + first * kLanes, static_cast<size_t>(length) * kLanes * sizeof(double));
    for (int begin = 0; begin < length; begin += kBlock) sort_block<false>(to + begin * kLanes);
    for (int size = 2 * kBlock; size <= length; size *= 2) {
      for (int begin = 0; begin < length; begin += size) merge_halves(to + begin * kLanes, size);
    }
    if (first == 0) continue;
    for (int i = 0; i < length; ++i) {
      store(list + i * kLanes, larger(load(list + i * kLanes), load(chunk + (length - 1 - i) * kLanes)));
    }
    sort_bitonic(list, length);
  }
}

// The length of a list that holds a top k.
inline int list_length(int64_t k) {
  int length = 1;
  while (length < k) length *= 2;
  return length;
}

// list[length * kLanes] = the top `length` of each lane of `vectors` vectors of candidates, a multiple of `length`;
// chunk: scratch, as large as the list.
inline void top_of_lanes(int length, const double* candidates, int64_t vectors, double* list, double* chunk) {
  switch (length) {
    case 1: return top_of_lanes<1>(candidates, vectors, list);
    case 2: return top_of_lanes<2>(candidates, vectors, list);
    case 4: return top_of_lanes<4>(candidates, vectors, list);
    case 8: return top_of_lanes<8>(candidates, vectors, list);
    case 16: return top_of_lanes<16>(candidates, vectors, list);
    default: return top_of_lanes_long(length, candidates, vectors, list, chunk);
  }
}

// Rows and lanes change places: a step for each bit of a lane's number.
template <int kBit, size_t... Lane>
[[gnu::always_inline]] inline void swap_bit(Candidates& a, Candidates& b, std::index_sequence<Lane...>) {
  constexpr size_t kOther = size_t{1} << kBit;
  const Candidates even = __builtin_shufflevector(a, b, (Lane & kOther ? kLanes + (Lane ^ kOther) : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & kOther ? kLanes + Lane : Lane ^ kOther)...);
  a = even;
}
template <int kBit = 0>
[[gnu::always_inline]] inline void transpose(Candidates (&rows)[kLanes]) {
  if constexpr ((1 << kBit) < kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      if ((i >> kBit & 1) == 0) swap_bit<kBit>(rows[i], rows[i + (1 << kBit)], std::make_index_sequence<kLanes>());
    }
    transpose<kBit + 1>(rows);
  }
}

[[gnu::always_inline]] inline Candidates load_candidates(const double* p) { return load(p); }
[[gnu::always_inline]] inline Candidates load_candidates(const float* p) {
  return __builtin_convertvector(load_lanes(p), Candidates);
}

// out[i][lane] = rows[lane][i] for i < count; float32 as float64: exact, and in the same order.
template <class T>
inline void lanes_of_rows(const T* const (&rows)[kLanes], int64_t first, int64_t count, double* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Candidates block[kLanes];
#pragma GCC unroll 8
    for (int lane = 0; lane < kLanes; ++lane) {
      block[lane] = load_candidates(rows[lane] + first + i);
    }
    transpose(block);
#pragma GCC unroll 8
    for (int j = 0; j < kLanes; ++j) store(out + (i + j) * kLanes, block[j]);
  }
  for (; i < count; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) out[i * kLanes + lane] = static_cast<double>(rows[lane][first + i]);
  }
}

}  // namespace
}  // namespace anabranch
