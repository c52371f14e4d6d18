// AB_INLINE: small functions that are inlined always, and compiled for host and device where the compiler knows both.
#pragma once

#if defined(__CUDACC__)
#define AB_INLINE __host__ __device__ __forceinline__
#else
#define AB_INLINE [[gnu::always_inline]] inline
#endif
