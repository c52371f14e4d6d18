/* Types shared by every operation of the C interface.
 *
 * All functions have the form
 *
 *     ab_status ab_OPERATION(const ab_OPERATION_args* args, const ab_exec* exec);
 *     ab_status ab_OPERATION_workspace(const ab_OPERATION_args* args, const ab_exec* exec, size_t* bytes);
 *
 * `args` holds the operation's options and pointers to tensor views; a NULL view means "not given" for an input and
 * "not wanted" for an output. Set `args->size` to sizeof(*args): it lets the struct grow without breaking callers. What
 * an older header lacks is not given, and what only a newer one has must be zero. Sizes that are taken: those of
 * version 0.1.0 and of this header, and larger multiples of 8 up to 4096.
 * Functions check everything that can be known without reading device data and return a status that names the argument,
 * what came and what was expected. They are thread-safe and keep no state. Every element of a wanted output is written.
 * Arithmetic on the CPU is IEEE (denormals kept, round to nearest), whatever the calling thread has set, except for
 * native bfloat16 GEMMs, whose instructions flush denormals: see experts.h.
 */
#ifndef ANABRANCH_TYPES_H_
#define ANABRANCH_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define AB_API __attribute__((visibility("default")))
#else
#define AB_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define AB_MAX_RANK 6

typedef enum ab_dtype {
  AB_BOOL = 1, /* one byte, 0 or 1 */
  AB_UINT8 = 2,
  AB_INT16 = 3,
  AB_INT32 = 4,
  AB_INT64 = 5,
  AB_FLOAT16 = 6,
  AB_BFLOAT16 = 7,
  AB_FLOAT32 = 8,
  AB_FLOAT8_E4M3 = 9 /* float8_e4m3fn: one byte, largest number 448, NaN 0x7f and 0xff, no infinity */
} ab_dtype;

/* A view of memory that the caller owns. */
typedef struct ab_tensor {
  void* data;    /* may be NULL when the tensor has no element */
  int32_t dtype; /* ab_dtype */
  int32_t rank;
  int64_t shape[AB_MAX_RANK];
  const int64_t* strides; /* in elements; NULL: row-major. Without gaps, an axis of no element counting as one of one,
                           * and row-major where no other order is offered. */
} ab_tensor;

typedef enum ab_status_code {
  AB_OK = 0,
  AB_INVALID_ARGUMENT = 1, /* an argument breaks a stated rule */
  AB_UNSUPPORTED = 2,      /* a valid call that this build or machine cannot serve */
  AB_OUT_OF_MEMORY = 3,
  AB_INTERNAL = 4 /* a fault in the library or one below it */
} ab_status_code;

typedef struct ab_status {
  int32_t code;      /* ab_status_code */
  char message[508]; /* empty when code is AB_OK; "argument: got X, expected Y" */
} ab_status;

/* Where and with what an operation runs. NULL stands for {size, 0, NULL, NULL, 0}. */
typedef struct ab_exec {
  size_t size;           /* sizeof(ab_exec) */
  int32_t num_threads;   /* CPU threads, at most 4096; 0: OpenMP's default. Results never depend on it. */
  void* stream;          /* cudaStream_t of the CUDA functions; NULL on the CPU */
  void* workspace;       /* scratch memory, 64-byte aligned, contents ignored and overwritten */
  size_t workspace_size; /* bytes; at least what ab_OPERATION_workspace says for the same args and num_threads */
} ab_exec;

/* "0.2.0" */
AB_API const char* ab_version(void);

/* Fills `text` with "key=value" lines that describe the build and this machine (version; isa: the instruction set, or
 * refused and why; bf16: how products of bfloat16 run, native, converted, or refused and why; threads, onednn); cuts at
 * `size` bytes, always ends with a NUL. */
AB_API void ab_describe(char* text, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_TYPES_H_ */
