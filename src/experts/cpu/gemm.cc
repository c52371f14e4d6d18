#include "experts/cpu/gemm.h"

#include <cstdlib>
#include <cstring>

#include "core/isa.h"

#ifdef ANABRANCH_ONEDNN

#include <dnnl_debug.h>
#include <dnnl.hpp>
#include <exception>
#include <new>
#include <unordered_map>

// oneDNN uses OpenMP threads, even if this build does not use OpenMP itself.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int);
}

namespace anabranch {
namespace {

class SingleThreaded {
 public:
  SingleThreaded() : saved_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(saved_); }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int saved_;
};

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

struct ShapeHash {
  size_t operator()(const GemmShape& s) const {
    size_t hash = static_cast<size_t>(s.transpose_a) * 8 + static_cast<size_t>(s.transpose_b) * 4 +
                  static_cast<size_t>(s.accumulate) * 2 + static_cast<size_t>(s.c_is_bf16);
    for (const int64_t value : {s.m, s.n, s.k, s.lda, s.ldb, s.ldc}) hash = hash * 1000003 + static_cast<size_t>(value);
    return hash;
  }
};

dnnl::memory view(int64_t rows, int64_t columns, bool transposed, int64_t stride, dnnl::memory::data_type type) {
  const dnnl::memory::dims strides = transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {dnnl::memory::desc({rows, columns}, type, strides), cpu(), nullptr};
}

// A GEMM of one shape, with views of its operands.
class Bf16Product {
 public:
  explicit Bf16Product(const GemmShape& s)
      : a_(view(s.m, s.k, s.transpose_a, s.lda, dnnl::memory::data_type::bf16)),
        b_(view(s.k, s.n, s.transpose_b, s.ldb, dnnl::memory::data_type::bf16)),
        c_(view(s.m, s.n, false, s.ldc, s.c_is_bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32)) {
    dnnl::primitive_attr attributes;
    // oneDNN's own scratchpad would be shared by all threads that share the primitive.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (s.accumulate) {
      dnnl::post_ops operations;
      operations.append_sum(1.0f);
      attributes.set_post_ops(operations);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc description(cpu(), a_.get_desc(), b_.get_desc(), c_.get_desc(), attributes);
#else
    const dnnl::matmul::desc operation(a_.get_desc(), b_.get_desc(), c_.get_desc());
    const dnnl::matmul::primitive_desc description(operation, attributes, cpu());
#endif
    product_ = dnnl::matmul(description);
    scratchpad_ = dnnl::memory(description.scratchpad_desc(), cpu(), nullptr);
  }

  size_t scratchpad_size() const { return scratchpad_.get_desc().get_size(); }

  void run(const dnnl::stream& stream, const void* a, const void* b, void* c, void* scratchpad) {
    a_.set_data_handle(const_cast<void*>(a));
    b_.set_data_handle(const_cast<void*>(b));
    c_.set_data_handle(c);
    scratchpad_.set_data_handle(scratchpad);
    product_.execute(
        stream, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}, {DNNL_ARG_SCRATCHPAD, scratchpad_}});
  }

 private:
  dnnl::memory a_;
  dnnl::memory b_;
  dnnl::memory c_;
  dnnl::memory scratchpad_;
  dnnl::matmul product_;
};

// Per-thread state that is cached between GEMMs. Row counts are padded to multiples of 8, so there are few shapes. A
// program with very many layer sizes clears the cache occasionally.
struct ThreadState {
  static constexpr size_t kMaxShapes = 512;
  dnnl::stream stream{cpu()};
  std::unordered_map<GemmShape, Bf16Product, ShapeHash> products;
  void* scratchpad = nullptr;
  size_t scratchpad_size = 0;

  ThreadState() = default;
  ~ThreadState() { std::free(scratchpad); }
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

  bool reserve(size_t size) {
    if (size <= scratchpad_size) return true;
    std::free(scratchpad);
    scratchpad_size = (size + 63) / 64 * 64;
    scratchpad = std::aligned_alloc(64, scratchpad_size);
    if (scratchpad == nullptr) scratchpad_size = 0;
    return scratchpad != nullptr;
  }
};

bool has_bf16() {
#if defined(__x86_64__)
  const auto has = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return isa() == Isa::avx512 && (has & needed) == needed;
#else
  return false;
#endif
}

}  // namespace

int gemm_f32(const GemmShape& s, const float* a, const float* b, float* c) {
  const SingleThreaded single;
  return dnnl_sgemm(s.transpose_a ? 'T' : 'N', s.transpose_b ? 'T' : 'N', s.m, s.n, s.k, 1.0f, a, s.lda, b, s.ldb,
                    s.accumulate ? 1.0f : 0.0f, c, s.ldc);
}

int gemm_bf16(const GemmShape& shape, const void* a, const void* b, void* c) {
  const SingleThreaded single;
  try {
    thread_local ThreadState state;
    if (state.products.size() >= ThreadState::kMaxShapes) state.products.clear();
    Bf16Product& product = state.products.try_emplace(shape, shape).first->second;
    if (!state.reserve(product.scratchpad_size())) return dnnl_out_of_memory;
    product.run(state.stream, a, b, c, state.scratchpad);
    return dnnl_success;
  } catch (const dnnl::error& failure) {
    return failure.status;
  } catch (const std::bad_alloc&) {
    return dnnl_out_of_memory;
  } catch (const std::exception&) {
    return dnnl_runtime_error;
  }
}

ab_status gemm_error(int failure) {
  if (failure == dnnl_out_of_memory) {
    return error(AB_OUT_OF_MEMORY, "oneDNN: a GEMM failed, expected memory for its packed operands");
  }
  return error(failure == dnnl_unimplemented ? AB_UNSUPPORTED : AB_INTERNAL, "oneDNN: a GEMM failed: %s",
               dnnl_status2str(static_cast<dnnl_status_t>(failure)));
}

}  // namespace anabranch

#else

#include "experts/cpu/kernels.h"

namespace anabranch {
namespace {

bool has_bf16() { return false; }

}  // namespace

int gemm_f32(const GemmShape& s, const float* a, const float* b, float* c) {
  AB_SELECT_ISA(kExperts).multiply(s.transpose_a, s.transpose_b, s.m, s.n, s.k, a, s.lda, b, s.ldb, s.accumulate, c,
                                   s.ldc);
  return 0;
}

int gemm_bf16(const GemmShape&, const void*, const void*, void*) { return 1; }  // never called: has_bf16() is false

ab_status gemm_error(int failure) { return error(AB_INTERNAL, "GEMM: got failure %d", failure); }

}  // namespace anabranch

#endif

namespace anabranch {
namespace {

const char* bf16_setting() {
  const char* setting = std::getenv("ANABRANCH_BF16");
  return setting == nullptr ? "" : setting;
}

Bf16Products choose_bf16() {
  const char* setting = bf16_setting();
  if (std::strcmp(setting, "convert") == 0) return Bf16Products::converted;
  if (std::strcmp(setting, "native") == 0) return has_bf16() ? Bf16Products::native : Bf16Products::refused;
  if (setting[0] != '\0') return Bf16Products::refused;
  return has_bf16() ? Bf16Products::native : Bf16Products::converted;
}

}  // namespace

Bf16Products bf16_products() {
  static const Bf16Products chosen = choose_bf16();
  return chosen;
}

ab_status check_bf16_products() {
  if (bf16_products() != Bf16Products::refused) return ok();
  return error(AB_UNSUPPORTED, "ANABRANCH_BF16: got %s, expected %s", bf16_setting(),
               std::strcmp(bf16_setting(), "native") == 0
                   ? "convert or unset, since there are no bfloat16 GEMMs here (isa, oneDNN or CPU)"
                   : "native, convert or unset");
}

}  // namespace anabranch
