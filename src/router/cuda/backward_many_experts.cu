// The generic kernel of the router's backward pass: any number of experts and any K, one warp per token.
//
// Gradients of the selected logits are computed with one slot per lane and scattered into a row of zeros in shared
// memory. The terms of all experts (softmax terms, auxiliary scores) are computed from the row of logits, one segment
// of the row at a time, with 8 consecutive experts per lane and step. Both are added when the row is written.
#include "balance/statistics.cuh"
#include "core/cuda/access.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/element.cuh"
#include "core/tensor.h"
#include "router/backward.h"
#include "router/cuda/backward.cuh"
#include "router/cuda/row.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kBlocks = 6;  // per SM: seven would spill registers
constexpr int kStep = 8;    // consecutive experts per lane

struct GenericCall {
  RouterBackward op;
  TokenTiles tiles;
  bool vectors;      // rows of logits and of their gradients are whole 16-byte vectors
  bool aux_vectors;  // rows of d_aux_scores are whole 16-byte vectors
  // bytes of a warp's shared memory, and byte offsets in it
  int warp;
  int experts;    // int32 [K]
  int values;     // float [K]
  int gradients;  // float [K]
  int row;        // float [E rounded up to whole steps]
};

// Converts 4 bytes of a row, one or two elements, to float32.
template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float* to) {
  if constexpr (sizeof(T) == 4) {
    to[0] = __uint_as_float(word);
  } else {
    to[0] = low_half<T>(word);
    to[1] = high_half<T>(word);
  }
}

// items[i] = element first + i of a row of `count` elements, or `fill` past its end. vectors: whether all rows start at
// multiples of 16 bytes and consist of whole 16-byte vectors.
template <int kItems>
__device__ __forceinline__ void load_items(const void* row, int32_t dtype, bool vectors, int first, int count,
                                           float fill, float (&items)[kItems]) {
  with_float_type(dtype, [&]<class T>(T) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    const T* from = static_cast<const T*>(row) + first;
    if (vectors && kItems % kVector == 0) {
#pragma unroll
      for (int i = 0; i < kItems; i += kVector) {
        if (first + i < count) {
          // By value: through a reference the compiler would load the elements one by one.
          const uint4 bytes = *reinterpret_cast<const uint4*>(from + i);
          constexpr int kWord = 4 / static_cast<int>(sizeof(T));
          unpack<T>(bytes.x, items + i);
          unpack<T>(bytes.y, items + i + kWord);
          unpack<T>(bytes.z, items + i + 2 * kWord);
          unpack<T>(bytes.w, items + i + 3 * kWord);
        } else {
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            if (i + j < kItems) items[i + j] = fill;
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) items[i] = first + i < count ? to_float(from[i]) : fill;
    }
  });
}

inline bool rows_are_vectors(const void* data, int64_t columns, int64_t element_size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns * element_size % 16 == 0;
}

// Calls f for the steps of a lane (of logits, cotangents or gradients): step j covers experts (j * kLanes + lane) *
// kStep ...
template <int kLanes, int kItems, class F>
__device__ __forceinline__ void for_steps(int lane, int segment, const F& f) {
#pragma unroll
  for (int j = 0; j < kItems / kStep; ++j) f(j * kStep, segment + (j * kLanes + lane) * kStep);
}

template <int kLanes, int kItems>
__device__ __forceinline__ void load_row(const void* data, int32_t dtype, bool vectors, int64_t row, int64_t E,
                                         int lane, int segment, float fill, float (&items)[kItems]) {
  const char* from = static_cast<const char*>(data) + row * E * (dtype == AB_FLOAT32 ? 4 : 2);
  for_steps<kLanes, kItems>(lane, segment, [&](int i, int expert) {
    float step[kStep];
    load_items(from, dtype, vectors, expert, static_cast<int>(E), fill, step);
#pragma unroll
    for (int k = 0; k < kStep; ++k) items[i + k] = step[k];
  });
}

// Stores 8 consecutive elements of a row of `count` elements, starting at `first`.
__device__ __forceinline__ void store_step(void* row, int32_t dtype, bool vectors, int first, int count,
                                           const float (&step)[kStep]) {
  with_float_type(dtype, [&]<class T>(T) {
    T* to = static_cast<T*>(row) + first;
    T values[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[i] = from_float<T>(step[i]);
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kStep; i += kVector) {
        uint4 bytes;
        memcpy(&bytes, values + i, sizeof(bytes));
        if (first + i < count) *reinterpret_cast<uint4*>(to + i) = bytes;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (first + i < count) to[i] = values[i];
      }
    }
  });
}

// One lane's part in the gradients of its warp's tokens. A row is processed in segments, and read again for each pass.
struct GenericGradients {
  static constexpr int kItems = 16;  // per segment
  static constexpr int kSegment = kWarp * kItems;

  const GenericCall& call;
  const RouterBackward& op;
  int E;
  int lane;
  Slots slots;
  float* gradients;  // [K], gradients of the slots' logits
  float* row;        // [E], gradients of the slots' experts, zeros elsewhere
  int64_t sequence;
  bool is_softmax;
  bool scores;     // auxiliary scores of an elementwise score function are requested
  bool reads_row;  // whether the gradient of every expert is needed

  // The sums over a row that the gradient of every expert needs.
  struct RowSums {
    RowSoftmax softmax{0.0f, 1.0f};
    float nan_or_zero = 0.0f;  // NaN if a softmax row contains NaN or infinity
    float dot = 0.0f;          // sum of cotangents times exponentials or scores
    float score_sum = 0.0f;    // sum of elementwise scores
    float shift = 0.0f;
  };

  // Loads the logits of the lane's experts in a segment.
  __device__ __forceinline__ void read_logits(int64_t t, bool unmasked, int segment, float (&z)[kItems]) const {
    if (unmasked) {
      load_row<kWarp>(op.logits, op.logits_dtype, call.vectors, t, E, lane, segment, -INFINITY, z);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = 0.0f;
    }
  }
  // Loads the cotangents of the auxiliary scores of these experts.
  __device__ __forceinline__ void read_cotangents(int64_t t, bool unmasked, int segment, float (&g)[kItems]) const {
    if (op.d_aux_scores.data != nullptr && unmasked) {
      load_row<kWarp>(op.d_aux_scores.data, op.d_aux_scores.dtype, call.aux_vectors, t, E, lane, segment, 0.0f, g);
    } else if (op.d_score_sum.data != nullptr) {
      load_row<kWarp>(op.d_score_sum.data, op.d_score_sum.dtype, false, sequence, E, lane, segment, 0.0f, g);
    }
  }

  // lse serves as the shift if it is known: dividing by the sum cancels its rounding.
  __device__ __forceinline__ float softmax_shift(int64_t t, bool unmasked) const {
    if (op.softmax_rows && op.lse != nullptr) return unmasked ? op.lse[t] * kLog2E : 0.0f;
    if (!op.softmax_rows && !(is_softmax && op.weighted)) return 0.0f;
    float top = -INFINITY;
    for (int segment = 0; segment < E; segment += kSegment) {
      float z[kItems];
      read_logits(t, unmasked, segment, z);
#pragma unroll
      for (int i = 0; i < kItems; ++i) top = fmaxf(top, z[i]);
    }
    return max_lanes<kWarp>(top) * kLog2E;
  }

  __device__ __forceinline__ RowSums sum_row(int64_t t, bool unmasked) const {
    RowSums sums;
    sums.softmax.shift = softmax_shift(t, unmasked);
    if (reads_row || (is_softmax && op.weighted && op.lse == nullptr)) {
      float power_sum = 0.0f;
      for (int segment = 0; segment < E; segment += kSegment) {
        float z[kItems];
        float g[kItems] = {};
        read_logits(t, unmasked, segment, z);
        read_cotangents(t, unmasked, segment, g);
        for_steps<kWarp, kItems>(lane, segment, [&](int i, int expert) {
#pragma unroll
          for (int k = i; k < i + kStep; ++k) {
            if (expert + k - i >= E) continue;
            if (op.softmax_rows || is_softmax) {
              const float power = sums.softmax.power(z[k]);
              power_sum += power;
              if (is_softmax) sums.dot = fmaf(power, g[k], sums.dot);
            }
            if (scores) {
              const float s = elementwise_score(op.score_function, z[k]);
              sums.score_sum += s;
              sums.dot = fmaf(s, g[k], sums.dot);
            }
          }
        });
      }
      power_sum = sum_lanes<kWarp>(power_sum);
      if (is_softmax || op.softmax_rows) {
        sums.softmax.factor = 1.0f / power_sum;
        sums.nan_or_zero = power_sum - power_sum;
      }
    } else if (is_softmax && op.weighted) {
      sums.nan_or_zero = unmasked ? op.lse[t] - op.lse[t] : 0.0f;
    }
    if (op.auxiliary) sums.dot = sum_lanes<kWarp>(sums.dot);
    if (scores) sums.score_sum = sum_lanes<kWarp>(sums.score_sum) + kSumEpsilon;
    return sums;
  }

  __device__ __forceinline__ void load_slots(int64_t t, bool unmasked) const {
    for (int k = lane; k < op.K; k += kWarp) {
      const int32_t expert = unmasked ? op.experts[t * op.K + k] : -1;
      const bool valid = expert >= 0 && expert < op.E;
      slots.experts[k] = valid ? expert : -1;
      if (!valid) continue;
      const float g = op.d_weights.data != nullptr ? load_float(op.d_weights.data, op.d_weights.dtype, t * op.K + k)
                                                   : load_float(op.d_probs.data, op.d_probs.dtype, t * op.E + expert);
      gradients[k] = g * op.scaling_factor;
      slots.values[k] = load_float(op.logits, op.logits_dtype, t * op.E + expert);
    }
  }

  // gradients[k] = dz of slot k from the cotangents of the weights (docs/semantics.md, router backward). Returns sum_R
  // g s for raw softmax, which the gradient of every expert needs; else 0.
  __device__ __forceinline__ float slot_gradients(int64_t t, const RowSums& sums) const {
    const float total =
        score_slots<kWarp>(op.score_function, op.normalize, sums.softmax, sums.nan_or_zero, slots, lane);
    float dot = 0.0f;
    if (is_softmax || op.normalize) {
      for_own_slots<kWarp>(slots, lane, [&](int k, int) { dot += gradients[k] * slots.values[k]; });
      dot = sum_lanes<kWarp>(dot);
    }
    for_own_slots<kWarp>(slots, lane, [&](int k, int expert) {
      if (is_softmax) {
        // normalised: dz_k = p_k (g_k - sum_R g p).  raw: dz_e = s_e ([e in R] g_e - sum_R g s).
        gradients[k] = slots.values[k] * (gradients[k] - (op.normalize ? dot : 0.0f));
        return;
      }
      // ds_k = (g_k - sum_R g_j s_j / S) / S, or g_k;  dz_k = ds_k s'(z_k)
      const float ds = op.normalize ? (gradients[k] - dot) / total : gradients[k];
      const float z = load_float(op.logits, op.logits_dtype, t * op.E + expert);
      gradients[k] = ds * elementwise_slope(op.score_function, z);
    });
    return is_softmax && !op.normalize ? dot : 0.0f;
  }

  // row[expert] = the sum of the gradients of the slots of that expert, in slot order, written by the first of these
  // slots.
  __device__ __forceinline__ void scatter_slots() const {
    for_own_slots<kWarp>(slots, lane, [&](int k, int expert) {
      float sum = 0.0f;
      bool first = true;
      for (int other = 0; other < slots.K; ++other) {
        if (slots.experts[other] != expert) continue;
        first = first && other >= k;
        sum += gradients[other];
      }
      if (first) row[expert] = sum;
    });
  }
  __device__ __forceinline__ void clear_row() const {
    for_own_slots<kWarp>(slots, lane, [&](int, int expert) { row[expert] = 0.0f; });
  }

  // Writes the row of gradients, the sum of:
  //   d_e = s_e (G_e - sum G s + d_lse - sum_R g s), s = softmax(z): auxiliary scores, lse and raw weights;
  //   s'_e (G_e - sum G s / S) / S: auxiliary scores of the other score functions;
  //   the slots' gradients in `row`.
  __device__ __forceinline__ void write(int64_t t, bool unmasked, const RowSums& sums) const {
    const float inverse = scores ? 1.0f / sums.score_sum : 0.0f;
    const float mean = sums.dot * inverse;
    for (int segment = 0; segment < E; segment += kSegment) {
      float z[kItems];
      float g[kItems] = {};
      if (reads_row) {
        read_logits(t, unmasked, segment, z);
        read_cotangents(t, unmasked, segment, g);
      }
      for_steps<kWarp, kItems>(lane, segment, [&](int i, int expert) {
        float step[kStep];
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          float d = 0.0f;
          if (op.softmax_rows) {
            const float from_scores = is_softmax && op.auxiliary ? g[i + k] : 0.0f;
            d = sums.softmax.power(z[i + k]) * sums.softmax.factor * (from_scores + sums.shift);
          }
          if (scores) d += (g[i + k] - mean) * inverse * elementwise_slope(op.score_function, z[i + k]);
          step[k] = unmasked ? d : 0.0f;
        }
        if (expert >= E) return;
        if (op.weighted) {
          const float4* added = reinterpret_cast<const float4*>(row + expert);
#pragma unroll
          for (int k = 0; k < kStep; k += 4) {
            const float4 four = added[k / 4];
            step[k] += four.x;
            step[k + 1] += four.y;
            step[k + 2] += four.z;
            step[k + 3] += four.w;
          }
        }
        char* const out = static_cast<char*>(op.d_logits) + t * op.E * (op.d_logits_dtype == AB_FLOAT32 ? 4 : 2);
        store_step(out, op.d_logits_dtype, call.vectors, expert, E, step);
      });
    }
  }
};

__global__ void __launch_bounds__(kWarps* kWarp, kBlocks) backward_generic(const __grid_constant__ GenericCall call) {
  char* const shared = dynamic_shared_array<char>();
  const RouterBackward& op = call.op;
  const int E = static_cast<int>(op.E);
  const int lane = lane_index();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  char* const memory = shared + warp_index() * call.warp;
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  const bool scores = op.auxiliary && !is_softmax;
  const GenericGradients gradients{
      call,
      op,
      E,
      lane,
      {reinterpret_cast<int32_t*>(memory + call.experts), reinterpret_cast<float*>(memory + call.values), op.K},
      reinterpret_cast<float*>(memory + call.gradients),
      reinterpret_cast<float*>(memory + call.row),
      blockIdx.x / call.tiles.blocks_per_sequence,
      is_softmax,
      scores,
      op.softmax_rows || scores};
  for (int i = lane; op.weighted && i < (E + kStep - 1) / kStep * kStep; i += kWarp) gradients.row[i] = 0.0f;
  __syncwarp();
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int64_t end = call.tiles.end(blockIdx.x);
  for (int64_t t = call.tiles.begin(blockIdx.x) + warp_index(); t < end; t += warps) {
    const bool unmasked = op.token_mask == nullptr || op.token_mask[t] != 0;
    GenericGradients::RowSums sums = gradients.sum_row(t, unmasked);
    float raw = 0.0f;
    if (op.weighted) {
      gradients.load_slots(t, unmasked);
      raw = gradients.slot_gradients(t, sums);
      __syncwarp();
      gradients.scatter_slots();
      __syncwarp();
    }
    sums.shift = -raw;
    if (op.d_lse.data != nullptr && unmasked) sums.shift += load_float(op.d_lse.data, op.d_lse.dtype, t);
    if (is_softmax && op.auxiliary) sums.shift -= sums.dot * sums.softmax.factor;
    gradients.write(t, unmasked, sums);
    if (op.weighted) {
      __syncwarp();
      gradients.clear_row();
      __syncwarp();
    }
  }
}

}  // namespace

ab_status launch_backward_generic(const RouterBackward& op, cudaStream_t stream) {
  GenericCall call{};
  call.op = op;
  const int64_t size = dtype_size(op.logits_dtype);
  call.vectors =
      rows_are_vectors(op.logits, op.E, size) && rows_are_vectors(op.d_logits, op.E, dtype_size(op.d_logits_dtype));
  call.aux_vectors = op.d_aux_scores.data != nullptr &&
                     rows_are_vectors(op.d_aux_scores.data, op.E, dtype_size(op.d_aux_scores.dtype));
  int64_t used = 0;
  const auto take = [&used](int64_t bytes) {
    const int64_t begin = used;
    used += (bytes + 15) / 16 * 16;
    return static_cast<int>(begin);
  };
  const int64_t slots = op.weighted ? op.K : 0;
  call.experts = take(slots * 4);
  call.values = take(slots * 4);
  call.gradients = take(slots * 4);
  call.row = take(op.weighted ? (op.E + kStep - 1) / kStep * kStep * 4 : 0);
  call.warp = static_cast<int>(used);
  constexpr int64_t kSharedBytes = 220 << 10;
  int warps = kWarps;
  while (warps > 1 && warps * used > kSharedBytes) warps /= 2;
  if (warps * used > kSharedBytes) {
    return error(AB_UNSUPPORTED,
                 "logits: got %lld experts with topk %d, expected sizes that fit in shared memory on CUDA",
                 static_cast<long long>(op.E), op.K);
  }
  call.tiles = TokenTiles(op.T, op.blocks.sequences, warps);
  return launch("router backward", backward_generic,
                {call.tiles.count(), warps * kWarp, static_cast<size_t>(warps * used), stream, true}, call);
}

}  // namespace anabranch::cuda
