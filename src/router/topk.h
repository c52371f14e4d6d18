// Exact top-k by sorting networks, a vector of lanes at a time.
//
// Candidates are positive float64 numbers (score.h: selection_key), no two alike; 0 is "none". A list holds `length`
// vectors; read down one lane it is sorted, largest first. The candidates of a token stream through the lanes of a list
// of the top `length` of each lane: sort a chunk, keep max(list[i], chunk[length-1-i]), which is bitonic, and sort that
// again. The lists of kLanes tokens are then transposed and merged in one: each of log2(kLanes) steps joins the lists
// of two tokens lane by lane and halves the lanes of a token, until lane l holds token l's list.
//
// A lane rarely has more than a few of a token's top k, so lists start shorter than k and grow as they join. A lane all
// of whose list is among the top k may have had more to give: the caller looks (stream_is_short) and falls back to
// lists of full length. Internal linkage: included by *.isa.cc files.
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

// Two lists of lanes (a: one token or group of tokens, b: another) side by side: `even` takes the lanes whose bit kBit
// is 0, `odd` the others; b's go where the bit is 1.
template <int kBit, size_t... Lane>
[[gnu::always_inline]] inline void split_lanes(Candidates a, Candidates b, Candidates& even, Candidates& odd,
                                               std::index_sequence<Lane...>) {
  constexpr size_t kOther = size_t{1} << kBit;
  even = __builtin_shufflevector(a, b, (Lane & kOther ? kLanes + (Lane ^ kOther) : Lane)...);
  odd = __builtin_shufflevector(a, b, (Lane & kOther ? kLanes + Lane : Lane ^ kOther)...);
}
template <int kBit>
[[gnu::always_inline]] inline void split_lanes(Candidates a, Candidates b, Candidates& even, Candidates& odd) {
  split_lanes<kBit>(a, b, even, odd, std::make_index_sequence<kLanes>());
}

// a = the top kTo of the lists a and b of length kFrom, their lanes joined as split_lanes says; kTo is kFrom or 2
// kFrom.
template <int kFrom, int kTo, int kBit>
inline void join_lists(double* a, const double* b) {
  Candidates even[kTo];
  Candidates odd[kFrom];
#pragma GCC unroll 16
  for (int i = 0; i < kFrom; ++i) split_lanes<kBit>(load(a + i * kLanes), load(b + i * kLanes), even[i], odd[i]);
#pragma GCC unroll 16
  for (int i = 0; i < kFrom; ++i) {
    if constexpr (kTo == kFrom) {
      even[i] = larger(even[i], odd[kFrom - 1 - i]);
    } else {
      even[kFrom + i] = odd[kFrom - 1 - i];
    }
  }
  apply_network<kTo, true>(even);
  store_list(a, even);
}

// Lists of `length` vectors up to kBlock are kept in registers. `stride` is the room of a list.
template <int kFrom, int kLength, int kBit>
inline void join_all(double* lists, int64_t stride) {
  if constexpr ((1 << kBit) < kLanes) {
    constexpr int kStep = 1 << kBit;
    constexpr int kTo = kFrom < kLength ? 2 * kFrom : kLength;
    for (int t = 0; t < kLanes; t += 2 * kStep) {
      join_lists<kFrom, kTo, kBit>(lists + t * stride, lists + (t + kStep) * stride);
    }
    join_all<kTo, kLength, kBit + 1>(lists, stride);
  }
}

// Longer lists are sorted in memory, blocks of kBlock in registers.
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

template <int kBit>
inline void join_all_long(int from, int length, double* lists, int64_t stride) {
  if constexpr ((1 << kBit) < kLanes) {
    constexpr int kStep = 1 << kBit;
    const bool grows = from < length;
    for (int t = 0; t < kLanes; t += 2 * kStep) {
      double* a = lists + t * stride;
      double* b = lists + (t + kStep) * stride;
      for (int i = 0; i < from; ++i) {
        Candidates even;
        Candidates odd;
        split_lanes<kBit>(load(a + i * kLanes), load(b + i * kLanes), even, odd);
        store(a + i * kLanes, even);
        store(b + i * kLanes, odd);
      }
      if (grows) {
        __builtin_memcpy(a + from * kLanes, b, static_cast<size_t>(from) * kLanes * sizeof(double));
        merge_halves(a, 2 * from);
      } else {
        for (int i = 0; i < from; ++i) {
          store(a + i * kLanes, larger(load(a + i * kLanes), load(b + (from - 1 - i) * kLanes)));
        }
        sort_bitonic(a, from);
      }
    }
    join_all_long<kBit + 1>(grows ? 2 * from : from, length, lists, stride);
  }
}

// The length of a list that holds a top k.
inline int list_length(int64_t k) {
  int length = 1;
  while (length < k) length *= 2;
  return length;
}

// The length to start with for the top k of `count` vectors: rarely short, and never where it holds all candidates.
inline int stream_length(int64_t k, int64_t count) {
  const int likely = list_length(2 * k / kLanes + 6);
  const int all = list_length(count);
  const int full = list_length(k);
  const int enough = likely < all ? likely : all;
  // Lists past kBlock start with at least one block.
  return enough >= full ? full : full > kBlock && enough < kBlock ? kBlock : enough;
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

template <int kLength>
inline void join_from(int from, double* lists, int64_t stride) {
  switch (from) {
    case kLength: return join_all<kLength, kLength, 0>(lists, stride);
    case kLength / 2: return join_all<(kLength + 1) / 2, kLength, 0>(lists, stride);
    case kLength / 4: return join_all<(kLength + 3) / 4, kLength, 0>(lists, stride);
    default: return join_all<(kLength + 7) / 8, kLength, 0>(lists, stride);
  }
}

// Joins the lists of kLanes tokens, of length `from`, into the first, of length `length`: lane l is then token l's
// list.
inline void join_tokens(int from, int length, double* lists, int64_t stride) {
  switch (length) {
    case 1: return join_all<1, 1, 0>(lists, stride);
    case 2: return join_from<2>(from, lists, stride);
    case 4: return join_from<4>(from, lists, stride);
    case 8: return join_from<8>(from, lists, stride);
    case 16: return join_from<16>(from, lists, stride);
    default: return join_all_long<0>(from, length, lists, stride);
  }
}

}  // namespace
}  // namespace anabranch
