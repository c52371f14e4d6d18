// Hopper's tensor core instructions: wgmma m64nNk16, operands in shared memory, float32 accumulators; and m64nNk32 for
// 8-bit elements, where each 16-bit element below is a pair of 8-bit elements.
//
// Operands consist of panels (panel.cuh). Panels along M or N are contiguous.
#pragma once

#include <cstdint>

#include "core/cuda/access.cuh"
#include "core/cuda/panel.cuh"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "core/major.h"

namespace anabranch::cuda {

constexpr int kWgmmaK = 16;

// The location of an operand as wgmma expects it (PTX ISA, "matrix descriptor"):
//
//   bits 0-13    address, in units of 16 bytes
//   bits 16-29   leading byte offset, in units of 16 bytes: the next panel if rows run along M or N, else ignored
//   bits 32-45   stride byte offset, in units of 16 bytes: from 8 rows of a panel to the next 8
//   bits 62-63   swizzle
//
// A Descriptor is the low half; the high half is a constant.
using Descriptor = uint32_t;
constexpr uint32_t kDescriptorHigh = uint32_t{1} << 30 | 8 * kSwizzleBytes / 16;

__device__ __forceinline__ Descriptor make_descriptor(uint32_t panel) {
  return uint32_t{kPanelBytes / 16} << 16 | (panel & 0x3ffffu) >> 4;
}

// Increments of a descriptor: to the next panel, or by kWgmmaK along k, which is 32 bytes along the rows, or 16 rows.
constexpr Descriptor kNextPanel = kPanelBytes / 16;
template <Major kMajor>
constexpr Descriptor kNextK = (kMajor == Major::k ? kWgmmaK * 2 : kWgmmaK * kSwizzleBytes) / 16;

// Orders ordinary accesses of a warpgroup to its accumulators before the wgmma instructions that follow.
__device__ __forceinline__ void fence_accumulators() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group that contains the wgmma instructions since the last call.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last kGroups groups are complete.
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}

// Prevents the compiler from moving reads of accumulators above the preceding wait.
template <int kCount>
__device__ __forceinline__ void finish_accumulators(float (&d)[kCount]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}

// These two functions serve epilogues that change accumulators conditionally. The compiler would change accumulators in
// their own registers, and would then wait for every single wgmma. So accumulators start with unspecified values for
// every tile, and epilogues change copies.
template <int kCount>
__device__ __forceinline__ void begin_accumulators(float (&d)[kCount]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "=f"(value));
}
template <int kCount>
__device__ __forceinline__ void copy_accumulators(float (&to)[kCount], const float* d) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.b32 %0, %1;" : "=f"(to[i]) : "f"(d[i]));
}

// Accumulators of m64nN: thread i of the warpgroup holds N/2 of them. Element 4 j + 2 p + q is at row 16 (i / 32) + i %
// 32 / 4 + 8 p, column 8 j + 2 (i % 4) + q.

// begin() issues d = a b, or d += a b if accumulate != 0, for 64 x kColumns elements and 16 elements along k.
// begin_if() issues d += a b if there != 0.
template <int kColumns, Major kMajorA, Major kMajorB, class Element>
struct Wgmma;

// Issues the float8_e4m3fn version, for 32 elements along k; both operands are Major::k.
template <int kColumns>
struct Wgmma8;

// Issues d[i, :] = the first of 16 rows of b, for every row i; the 15 other rows of b must be 0. Computes a b, where
// `a` is in registers and has ones in its first column and zeros elsewhere. b is Major::mn.
template <int kColumns, class Element>
struct WgmmaOfOnes;

// The registers of that A operand: each covers rows i / 4 and i / 4 + 8 of a warp's 16 rows (two equal registers),
// columns 2 (i % 4) and 2 (i % 4) + 1.
template <class Element>
__device__ __forceinline__ uint32_t first_column_of_ones() {
  return lane_index() % 4 == 0 ? pack<Element>(1.0f, 0.0f) : 0u;
}

// Operand numbers of the first 8 (i + 1) accumulators, and their registers.
#define AB_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AB_R1 AB_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AB_R2 AB_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define AB_R3 AB_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define AB_R4 AB_R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define AB_R5 AB_R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define AB_R6 AB_R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define AB_R7 AB_R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define AB_R8 AB_R7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define AB_R9 AB_R8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define AB_R10 AB_R9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define AB_R11 AB_R10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define AB_R12 AB_R11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define AB_R13 AB_R12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define AB_R14 AB_R13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define AB_R15 AB_R14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define AB_EIGHT(i)                                                                                                   \
  "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]), \
      "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define AB_D3 AB_EIGHT(0), AB_EIGHT(1), AB_EIGHT(2), AB_EIGHT(3)
#define AB_D7 AB_D3, AB_EIGHT(4), AB_EIGHT(5), AB_EIGHT(6), AB_EIGHT(7)
#define AB_D11 AB_D7, AB_EIGHT(8), AB_EIGHT(9), AB_EIGHT(10), AB_EIGHT(11)
#define AB_D15 AB_D11, AB_EIGHT(12), AB_EIGHT(13), AB_EIGHT(14), AB_EIGHT(15)

// LAST: the index of the last group of 8 accumulators. A ... TRANSPOSE_B: operand numbers, which follow those of the
// accumulators.
#define AB_WGMMA_OF(COLUMNS, ELEMENT, TYPE, LAST, A, B, FLAG, HIGH, TRANSPOSE_A, TRANSPOSE_B)                         \
  template <Major kMajorA, Major kMajorB>                                                                             \
  struct Wgmma<COLUMNS, kMajorA, kMajorB, ELEMENT> {                                                                  \
    static __device__ __forceinline__ void begin(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b,                 \
                                                 int accumulate) {                                                    \
      asm volatile(AB_WGMMA_TEXT(COLUMNS, TYPE, LAST, A, B, FLAG, HIGH, TRANSPOSE_A, TRANSPOSE_B, "", "flag")         \
                   : AB_D##LAST                                                                                       \
                   : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh), "n"(static_cast<int>(kMajorA)),           \
                     "n"(static_cast<int>(kMajorB)));                                                                 \
    }                                                                                                                 \
    static __device__ __forceinline__ void begin_if(int there, float (&d)[COLUMNS / 2], Descriptor a, Descriptor b) { \
      asm volatile(AB_WGMMA_TEXT(COLUMNS, TYPE, LAST, A, B, FLAG, HIGH, TRANSPOSE_A, TRANSPOSE_B, "@flag ", "1")      \
                   : AB_D##LAST                                                                                       \
                   : "r"(a), "r"(b), "r"(there), "n"(kDescriptorHigh), "n"(static_cast<int>(kMajorA)),                \
                     "n"(static_cast<int>(kMajorB)));                                                                 \
    }                                                                                                                 \
  }
// GUARD "@flag ": issue the MMA only if the flag is set. SCALE_D "flag": add to d only if it is set.
#define AB_WGMMA_TEXT(COLUMNS, TYPE, LAST, A, B, FLAG, HIGH, TRANSPOSE_A, TRANSPOSE_B, GUARD, SCALE_D)          \
  "{\n"                                                                                                         \
  ".reg .pred flag;\n"                                                                                          \
  ".reg .b64 a, b;\n"                                                                                           \
  "setp.ne.b32 flag, " FLAG                                                                                     \
  ", 0;\n"                                                                                                      \
  "mov.b64 a, {" A ", " HIGH                                                                                    \
  "};\n"                                                                                                        \
  "mov.b64 b, {" B ", " HIGH "};\n" GUARD "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE \
  " {" AB_R##LAST "}, a, b, " SCALE_D ", 1, 1, " TRANSPOSE_A ", " TRANSPOSE_B                                   \
                  ";\n"                                                                                         \
                  "}\n"
// A, B, ACCUMULATE, HIGH: operand numbers.
#define AB_WGMMA8(COLUMNS, LAST, A, B, ACCUMULATE, HIGH)                                              \
  template <>                                                                                         \
  struct Wgmma8<COLUMNS> {                                                                            \
    static __device__ __forceinline__ void begin(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b, \
                                                 int accumulate) {                                    \
      asm volatile(                                                                                   \
          "{\n"                                                                                       \
          ".reg .pred accumulate;\n"                                                                  \
          ".reg .b64 a, b;\n"                                                                         \
          "setp.ne.b32 accumulate, " ACCUMULATE                                                       \
          ", 0;\n"                                                                                    \
          "mov.b64 a, {" A ", " HIGH                                                                  \
          "};\n"                                                                                      \
          "mov.b64 b, {" B ", " HIGH                                                                  \
          "};\n"                                                                                      \
          "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" AB_R##LAST               \
          "}, a, b, accumulate, 1, 1;\n"                                                              \
          "}\n"                                                                                       \
          : AB_D##LAST                                                                                \
          : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh));                                   \
    }                                                                                                 \
  }
// ONES, ZEROS, B, THERE, HIGH: operand numbers.
#define AB_WGMMA_OF_ONES(COLUMNS, ELEMENT, TYPE, LAST, ONES, ZEROS, B, THERE, HIGH)                     \
  template <>                                                                                           \
  struct WgmmaOfOnes<COLUMNS, ELEMENT> {                                                                \
    static __device__ __forceinline__ void begin_if(int there, float (&d)[COLUMNS / 2], Descriptor b) { \
      asm volatile(                                                                                     \
          "{\n"                                                                                         \
          ".reg .pred there;\n"                                                                         \
          ".reg .b64 b;\n"                                                                              \
          "setp.ne.b32 there, " THERE                                                                   \
          ", 0;\n"                                                                                      \
          "mov.b64 b, {" B ", " HIGH                                                                    \
          "};\n"                                                                                        \
          "@there wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" AB_R##LAST  \
          "}, {" ONES ", " ONES ", " ZEROS ", " ZEROS                                                   \
          "}, b, 0, 1, 1, 1;\n"                                                                         \
          "}\n"                                                                                         \
          : AB_D##LAST                                                                                  \
          : "r"(first_column_of_ones<ELEMENT>()), "r"(0), "r"(b), "r"(there), "n"(kDescriptorHigh));    \
    }                                                                                                   \
  }
#define AB_WGMMA(COLUMNS, LAST, ...)                         \
  AB_WGMMA_OF(COLUMNS, BFloat16, "bf16", LAST, __VA_ARGS__); \
  AB_WGMMA_OF(COLUMNS, Float16, "f16", LAST, __VA_ARGS__)
#define AB_WGMMA_ONES(COLUMNS, LAST, ...)                         \
  AB_WGMMA_OF_ONES(COLUMNS, BFloat16, "bf16", LAST, __VA_ARGS__); \
  AB_WGMMA_OF_ONES(COLUMNS, Float16, "f16", LAST, __VA_ARGS__)

AB_WGMMA(64, 3, "%32", "%33", "%34", "%35", "%36", "%37");
AB_WGMMA(128, 7, "%64", "%65", "%66", "%67", "%68", "%69");
AB_WGMMA(192, 11, "%96", "%97", "%98", "%99", "%100", "%101");
AB_WGMMA(256, 15, "%128", "%129", "%130", "%131", "%132", "%133");

AB_WGMMA8(128, 7, "%64", "%65", "%66", "%67");

AB_WGMMA_ONES(64, 3, "%32", "%33", "%34", "%35", "%36");
AB_WGMMA_ONES(128, 7, "%64", "%65", "%66", "%67", "%68");
AB_WGMMA_ONES(192, 11, "%96", "%97", "%98", "%99", "%100");
AB_WGMMA_ONES(256, 15, "%128", "%129", "%130", "%131", "%132");

#undef AB_WGMMA_ONES
#undef AB_WGMMA_OF_ONES
#undef AB_WGMMA8
#undef AB_WGMMA
#undef AB_WGMMA_TEXT
#undef AB_WGMMA_OF
#undef AB_D15
#undef AB_D11
#undef AB_D7
#undef AB_D3
#undef AB_EIGHT
#undef AB_R15
#undef AB_R14
#undef AB_R13
#undef AB_R12
#undef AB_R11
#undef AB_R10
#undef AB_R9
#undef AB_R8
#undef AB_R7
#undef AB_R6
#undef AB_R5
#undef AB_R4
#undef AB_R3
#undef AB_R2
#undef AB_R1
#undef AB_R0

}  // namespace anabranch::cuda
