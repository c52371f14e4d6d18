/* Exchange of blocks between the GPUs of one host over NVLink or PCIe: libanabranch_cuda.so.
 *
 * A group has P ranks, one per device. Each rank owns an exchange: buffers in device memory that its peers write to,
 * and flags. Copy engines push the blocks, so a transfer takes no SMs from the kernels that run beside it. Small blocks
 * are pushed by a kernel, which takes less time.
 * The ranks may be in one process (peer access) or in several processes of one host (cudaIpc).
 *
 * Order of calls:
 *
 *     1. create, on every rank, with the same sizes
 *     2. export, and exchange the handles of all ranks (all-gather of AB_EXCHANGE_HANDLE_BYTES bytes)
 *     3. connect, on every rank, with the handles in the order of the ranks. The ranks then compare their statuses; if
 *        one of them failed, all destroy their exchanges.
 *     4. all_gather, all_to_all, sum, release, and the calls of other headers that take an exchange: on every rank in
 *        the same order, with the same buffers, sizes, lockstep and part, and with `out` on all ranks or on none
 *     5. destroy, on every rank, after its last call
 *
 * An exchange has a fixed size. To grow it, the ranks agree on the new size, destroy the old exchange, create a larger
 * one and connect it. The old memory is freed at the latest by that connect.
 *
 * Streams and graphs. A call enqueues its work on exec->stream and, for large blocks, on streams of the exchange, which
 * fork from and join exec->stream, and returns: it never waits for the device or for another rank, and allocates
 * nothing. All state that changes from call to call is in device memory. So calls can be captured in CUDA graphs, and
 * replays can be mixed with other calls. The calls on one exchange must run one after another on the device: on one
 * stream, or on streams that events order. The current device must be that of the exchange.
 *
 * Deadlock. The device work of a call waits only for earlier steps of the same calls of other ranks. It cannot
 * deadlock if
 *     - all ranks make the calls on all exchanges that share a device in one order (as with NCCL);
 *     - the host thread that makes the calls of several devices does not run more than 20 calls ahead on one of them,
 *       and does nothing in between that waits for a device, such as the first launch of a kernel under lazy loading;
 *     - create, connect and destroy, which may wait for the devices of the process, are called when every call on the
 *       exchanges of the process has been made by all its ranks.
 *
 * Errors. A wait for another rank has a time limit. When it runs out, when two ranks make different calls, or when a
 * buffer is used again before it was released, the exchange is broken on all ranks. Outputs of this and of later calls
 * are NaN, or bytes 0xff for other dtypes (-1 for signed integers), and waits return at once. On every rank, check and
 * calls return AB_INTERNAL once its device has noticed; the message names the rank that was waited for, and the step.
 */
#ifndef ANABRANCH_EXCHANGE_H_
#define ANABRANCH_EXCHANGE_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define AB_EXCHANGE_MAX_RANKS 16
#define AB_EXCHANGE_BUFFERS 4
#define AB_EXCHANGE_HANDLE_BYTES 512
#define AB_EXCHANGE_ALL_BUFFERS (-1)

typedef struct ab_exchange_create_args {
  size_t size;
  int32_t device; /* number of the CUDA runtime */
  int32_t rank;   /* in [0, ranks) */
  int32_t ranks;  /* P, 1 to AB_EXCHANGE_MAX_RANKS */
  float timeout;  /* seconds that a wait for another rank may take; 0: ANABRANCH_EXCHANGE_TIMEOUT, or 600 */
  /* The bytes of each buffer; 0: an unused buffer. A call on a buffer needs P times the bytes of a block. Calls that
   * alternate between two buffers do not wait until the peers have read the result of the previous call. */
  int64_t buffer_bytes[AB_EXCHANGE_BUFFERS];
} ab_exchange_create_args;

/* Allocates the memory, loads all kernels and returns a new exchange in *exchange (NULL on failure). The caller owns
 * it. Besides the buffers it takes 4 MiB on the device. */
AB_API ab_status ab_cuda_exchange_create(const ab_exchange_create_args* args, ab_exchange** exchange);

/* Writes AB_EXCHANGE_HANDLE_BYTES bytes that describe the exchange to the other ranks. They are valid until destroy. */
AB_API ab_status ab_cuda_exchange_export(const ab_exchange* exchange, void* handle);

/* Opens the memory of all peers. handles: P times AB_EXCHANGE_HANDLE_BYTES bytes in the order of the ranks. Returns
 * AB_UNSUPPORTED with the reason if a peer is on another host or on the same device, has another version of this
 * library, or if its memory cannot be accessed from this device; AB_INVALID_ARGUMENT if a handle is not that of the
 * expected rank or if the sizes of two ranks differ. The exchange is then unchanged. */
AB_API ab_status ab_cuda_exchange_connect(ab_exchange* exchange, const void* handles, size_t bytes);

/* The address of a buffer on this rank, and its size. */
AB_API ab_status ab_cuda_exchange_buffer(const ab_exchange* exchange, int32_t buffer, void** data, int64_t* bytes);

/* Gives a connected exchange a name, by which custom calls of XLA find it: a program contains the name, and each device
 * that runs it takes its own exchange with that name. AB_INVALID_ARGUMENT if this process has an exchange with this
 * name on the same device. The name is valid until destroy. */
AB_API ab_status ab_cuda_exchange_register(ab_exchange* exchange, const char* name);

/* AB_INTERNAL if the exchange is broken. Does not wait for the device. */
AB_API ab_status ab_cuda_exchange_check(const ab_exchange* exchange);

/* Waits for the device of the exchange, then closes it. NULL is accepted. No other thread may use the exchange during
 * this call, and graphs with calls on it must not be replayed afterwards.
 *
 * Peers may still be at work: the memory that they write to is kept until all of them have destroyed their exchanges,
 * and is freed by a later create, connect or destroy of this process. If peers are in other processes, the 2 MiB of the
 * flags stay allocated until the process ends. So does the memory if a peer never destroys its exchange. */
AB_API ab_status ab_cuda_exchange_destroy(ab_exchange* exchange);

/* Writes "key=value" lines: the rank, the device, the buffers, the time limit, how each peer is reached, and the
 * status. exchange NULL: for each device the devices whose memory it can access, or error=REASON. Truncates at `size`
 * bytes and always ends with a NUL. */
AB_API void ab_cuda_exchange_describe(const ab_exchange* exchange, char* text, size_t size);

/* Tensors have any dtype but AB_BOOL, which cannot say that it is invalid.
 *
 * lockstep: a push to rank r+i+1 starts after the block of rank r-i has arrived, so that no two ranks push to one
 * receiver. All ranks must set it alike. Its waits take an SM: kernels that wait for the blocks of this call must not
 * fill the device.
 *
 * part: a call can be made in two parts with equal arguments, START and FINISH, to overlap the transfer with kernels in
 * between. x must not change and `out` must not be read before FINISH; both parts must be on one stream or ordered by
 * events, and no other call on the buffer comes between them. A call with the exchange in its field `arriving`
 * replaces FINISH.
 *
 * Small blocks: a call with `out`, part = AB_EXCHANGE_WHOLE, lockstep = 0 and blocks of at most 512 KiB is one kernel
 * of at most 16 thread blocks. It needs no copy engine, so it does not wait until pushes of other exchanges have ended.
 */
enum { AB_EXCHANGE_WHOLE = 0, AB_EXCHANGE_START = 1, AB_EXCHANGE_FINISH = 2 };

/* out = the x of all ranks, in the order of the ranks. */
typedef struct ab_exchange_all_gather_args {
  size_t size;
  ab_exchange* exchange;
  int32_t buffer;     /* the buffer that the blocks arrive in: P times the bytes of x */
  int32_t lockstep;   /* 0 or 1 */
  int32_t part;       /* AB_EXCHANGE_WHOLE, _START or _FINISH */
  int32_t reserved;   /* 0 */
  const ab_tensor* x; /* [T, D]; may be this rank's place in the buffer */
  /* [P T, D] of the dtype of x. NULL: the result stays in the buffer, in the same order, and belongs to the caller
   * until ab_cuda_exchange_release. */
  const ab_tensor* out;
  /* Further tensors of other sizes and dtypes, each with its result, or NULL. Only with `out`, part = WHOLE and
   * lockstep = 0. One kernel moves all tensors, as it moves small blocks. The buffer must hold all results, each
   * rounded up to a multiple of 16 bytes. */
  const ab_tensor* x_2;
  const ab_tensor* out_2;
  const ab_tensor* x_3;
  const ab_tensor* out_3;
} ab_exchange_all_gather_args;

AB_API ab_status ab_cuda_exchange_all_gather(const ab_exchange_all_gather_args* args, const ab_exec* exec);

/* Block s of out = block r of the x of rank s, where r is this rank. */
typedef struct ab_exchange_all_to_all_args {
  size_t size;
  ab_exchange* exchange;
  int32_t buffer;       /* the buffer that the blocks arrive in: the bytes of x */
  int32_t lockstep;     /* 0 or 1 */
  int32_t part;         /* AB_EXCHANGE_WHOLE, _START or _FINISH */
  int32_t reserved;     /* 0 */
  const ab_tensor* x;   /* [P T, D]: P blocks, one per destination */
  const ab_tensor* out; /* [P T, D] of the dtype of x, or NULL: as in ab_exchange_all_gather_args */
} ab_exchange_all_to_all_args;

AB_API ab_status ab_cuda_exchange_all_to_all(const ab_exchange_all_to_all_args* args, const ab_exec* exec);

/* Allows the peers to overwrite a buffer. Call it once after each call with out = NULL, in stream order after the
 * kernels that read the buffer. If the exchange broke in the meantime, what they read may be wrong: the status of the
 * next call and of check says so.
 *
 * buffer = AB_EXCHANGE_ALL_BUFFERS abandons all calls that have begun, after an error between two of them: exec->stream
 * waits for all copies of this rank, also if the exchange is broken, then for the blocks of the peers, and releases all
 * buffers. Afterwards the tensors of these calls may be freed. The next calls work if all ranks have begun the same
 * calls before they abandoned them; otherwise blocks are reported missing when a time limit runs out. */
typedef struct ab_exchange_release_args {
  size_t size;
  ab_exchange* exchange;
  int32_t buffer;   /* or AB_EXCHANGE_ALL_BUFFERS */
  int32_t reserved; /* 0 */
} ab_exchange_release_args;

AB_API ab_status ab_cuda_exchange_release(const ab_exchange_release_args* args, const ab_exec* exec);

/* The sums that ab_grouped_matmul_combine has returned (its field `returning`) to this rank:
 *
 *     out = factor * (sums of rank 0) + factor * (sums of rank 1) + ... + addend
 *
 * Products and sums are float32, in the order of the ranks, then the addend; `out` is rounded once. The call waits for
 * the sums of the peers and releases the buffer. Afterwards `sums` may be overwritten. */
typedef struct ab_exchange_sum_args {
  size_t size;
  ab_exchange* exchange;
  int32_t buffer;
  float factor;            /* finite */
  const ab_tensor* sums;   /* [P T, D] float: the `out` of that call */
  const ab_tensor* addend; /* [T, D] float, or NULL: zeros */
  const ab_tensor* out;    /* [T, D] float; may be the addend if both have one dtype */
} ab_exchange_sum_args;

AB_API ab_status ab_cuda_exchange_sum(const ab_exchange_sum_args* args, const ab_exec* exec);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_EXCHANGE_H_ */
