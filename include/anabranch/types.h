/* Types shared by every operation of the C interface.
 *
 * All functions have the form
 *
 *     ab_status ab_OPERATION(const ab_OPERATION_args* args, const ab_exec* exec);
 *     ab_status ab_OPERATION_workspace(const ab_OPERATION_args* args, const ab_exec* exec, size_t* bytes);
 *
 * `args` contains the options of the operation and pointers to tensor views. A NULL view means "not given" for an
 * input and "not requested" for an output. Set `args->size` to sizeof(*args): the struct can then grow without
 * breaking callers. A field that an older header lacks counts as not given; a field that only a newer header has
 * must be zero. Accepted sizes: those of version 0.1.0 and of this header, and larger multiples of 8 up to 4096.
 *
 * Functions check everything that can be known without reading device data. On an error the returned status names
 * the argument, the value it got and the value it expected. Functions are thread-safe and keep no state. Every
 * element of a requested output is written. Arithmetic on the CPU is IEEE (denormals are preserved, rounding is to
 * nearest), whatever modes the calling thread has set, except for native bfloat16 GEMMs, whose instructions flush
 * denormals: see experts.h. */
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
  AB_FLOAT8_E4M3 = 9,    /* float8_e4m3fn: one byte, largest number 448, NaN 0x7f and 0xff, no infinity */
  AB_FLOAT4_E2M1X2 = 10, /* two float4_e2m1 per byte, the first in the low half; shapes and strides count elements */
  AB_FLOAT8_E8M0 = 11    /* float8_e8m0fnu: the scale 2^(byte - 127), NaN 255 */
} ab_dtype;

/* A view of memory that the caller owns. */
typedef struct ab_tensor {
  void* data;    /* may be NULL if the tensor has no elements */
  int32_t dtype; /* ab_dtype */
  int32_t rank;
  int64_t shape[AB_MAX_RANK];
  const int64_t* strides; /* in elements; NULL: row-major. Strides must leave no gaps (an axis of size 0 counts as
                           * size 1) and must be row-major where no other order is documented. */
} ab_tensor;

typedef enum ab_status_code {
  AB_OK = 0,
  AB_INVALID_ARGUMENT = 1, /* an argument breaks a stated rule */
  AB_UNSUPPORTED = 2,      /* a valid call that this build or machine does not support */
  AB_OUT_OF_MEMORY = 3,
  AB_INTERNAL = 4 /* a fault in this library or in one that it uses */
} ab_status_code;

typedef struct ab_status {
  int32_t code;      /* ab_status_code */
  char message[508]; /* empty when code is AB_OK; "argument: got X, expected Y" */
} ab_status;

/* Where and with which resources an operation runs. NULL means {size, 0, NULL, NULL, 0}. */
typedef struct ab_exec {
  size_t size;           /* sizeof(ab_exec) */
  int32_t num_threads;   /* CPU threads, at most 4096; 0: OpenMP's default. Results never depend on it. */
  void* stream;          /* cudaStream_t for the CUDA functions; NULL on the CPU */
  void* workspace;       /* scratch memory, 64-byte aligned; its contents are ignored and overwritten */
  size_t workspace_size; /* bytes; at least the result of ab_OPERATION_workspace for the same args and num_threads */
} ab_exec;

/* "0.2.0" */
AB_API const char* ab_version(void);

/* Writes "key=value" lines that describe the build and this machine to `text` (version; isa: the instruction set, or
 * "refused" and the reason; bf16: how bfloat16 GEMMs run: native, converted, or "refused" and the reason; threads;
 * onednn). Truncates at `size` bytes and always ends with a NUL. */
AB_API void ab_describe(char* text, size_t size);

/* A rank of an exchange between GPUs, see exchange.h. */
typedef struct ab_exchange ab_exchange;

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_TYPES_H_ */
