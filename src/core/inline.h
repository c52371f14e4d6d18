// AB_INLINE marks small functions that are always inlined. A CUDA compiler compiles them for host and device.
#pragma once

#if defined(__CUDACC__)
#define AB_INLINE __host__ __device__ __forceinline__
#else
#define AB_INLINE [[gnu::always_inline]] inline
#endif
