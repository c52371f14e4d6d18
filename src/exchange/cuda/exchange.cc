// Life of an exchange: create, export, connect, check, describe and destroy.
#include "exchange/cuda/exchange.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "core/cuda/device.h"
#include "core/entry.h"
#include "exchange/cuda/identity.h"
#include "exchange/cuda/kernels.h"
#include "exchange/cuda/registry.h"

namespace anabranch::cuda {

using exchange::Flags;
using exchange::Handle;
using exchange::kBuffers;
using exchange::kMaxRanks;
using exchange::Shape;
using exchange::Word;

namespace {

// Buffers begin at multiples of this, as allocations of CUDA do.
constexpr int64_t kAlignment = 512;
int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

char* buffer_of(const ab_exchange& exchange, int rank, int buffer) {
  char* begin = exchange.buffers[rank];
  for (int b = 0; b < buffer; ++b) begin += round_up(exchange.shape.buffer_bytes[b]);
  return begin;
}

int64_t bytes_of_buffers(const Shape& shape) {
  int64_t bytes = 0;
  for (const int64_t size : shape.buffer_bytes) bytes += round_up(size);
  return bytes;
}

ab_status check_failure(const ab_exchange& exchange) {
  exchange::Report* const report = exchange.arena.report;
  if (__atomic_load_n(&report->failure, __ATOMIC_ACQUIRE) == 0) return ok();
  return exchange::status_of(*report, exchange.group.limit);
}

ab_status check_callable(const ab_exchange* exchange, const char* name) {
  if (exchange == nullptr) {
    return AB_INVALID("%s: got NULL, expected an exchange of ab_cuda_exchange_create", name);
  }
  if (!exchange->connected) {
    return AB_INVALID("%s: got an exchange that is not connected, expected ab_cuda_exchange_connect first", name);
  }
  int device = 0;
  AB_RETURN_IF_CUDA_ERROR("cudaGetDevice", cudaGetDevice(&device));
  if (device != exchange->arena.device) {
    return AB_INVALID("%s: got a call on device %d, expected its device %d", name, device, exchange->arena.device);
  }
  return ok();
}

ab_status check_usable(const ab_exchange* exchange, const char* name) {
  AB_RETURN_IF_ERROR(check_callable(exchange, name));
  return check_failure(*exchange);
}

namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == exchange::kIpcBytes, "the handle has room for those of cudaIpc");

const char* read_timeout_variable() {
  static const char* const value = std::getenv("ANABRANCH_EXCHANGE_TIMEOUT");
  return value;
}

cudaError_t share(void* memory, char (&handle)[exchange::kIpcBytes]) {
  return cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), memory);
}

ab_status describe_exchange(const ab_exchange& exchange, Handle* handle) {
  std::memcpy(handle->magic, exchange::kHandleMagic, sizeof(handle->magic));
  std::snprintf(handle->version, sizeof(handle->version), "%s", ANABRANCH_VERSION);
  AB_RETURN_IF_ERROR(describe_process(handle));
  handle->rank = exchange.shape.rank;
  handle->ranks = exchange.shape.ranks;
  std::memcpy(handle->buffer_bytes, exchange.shape.buffer_bytes, sizeof(handle->buffer_bytes));
  handle->id = exchange.arena.id;
  handle->number = exchange.arena.device;
  cudaDeviceProp properties;
  AB_RETURN_IF_CUDA_ERROR("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, exchange.arena.device));
  std::memcpy(handle->device, &properties.uuid, sizeof(handle->device));
  AB_RETURN_IF_CUDA_ERROR("cudaDeviceGetPCIBusId",
                          cudaDeviceGetPCIBusId(handle->pci, sizeof(handle->pci), exchange.arena.device));
  handle->flags = exchange.arena.flags;
  handle->buffers = exchange.arena.buffers;
  // Ranks of one process need no cudaIpc, so a failure matters only to peers in other processes.
  cudaError_t failure = share(exchange.arena.flags, handle->flags_ipc);
  if (failure == cudaSuccess) failure = share(exchange.arena.buffers, handle->buffers_ipc);
  if (failure != cudaSuccess) cudaGetLastError();  // clear it
  handle->ipc_error = static_cast<int32_t>(failure);
  return ok();
}

ab_status create(const ab_exchange_create_args& args, ab_exchange* exchange) {
  AB_RETURN_IF_ERROR(exchange::check_create(&args, read_timeout_variable(), &exchange->shape, &exchange->group.limit));
  int devices = 0;
  const cudaError_t failure = cudaGetDeviceCount(&devices);
  if (failure != cudaSuccess || devices == 0) {
    cudaGetLastError();  // clear it
    return error(AB_UNSUPPORTED, "exchange: no usable GPU: %s",
                 failure == cudaSuccess ? "no device" : cudaGetErrorString(failure));
  }
  if (args.device >= devices) return AB_INVALID("device: got %d, expected one of %d devices", args.device, devices);
  return on_device(args.device, [&] {
    Device device;
    AB_RETURN_IF_ERROR(find_device("exchange", &device));
    AB_RETURN_IF_ERROR(load_kernels());
    const int64_t bytes = bytes_of_buffers(exchange->shape);
    AB_RETURN_IF_ERROR(create_arena(args.device, bytes, args.rank, &exchange->arena));
    exchange->group.rank = args.rank;
    exchange->group.ranks = args.ranks;
    exchange->group.report = exchange->arena.report;
    return describe_exchange(*exchange, &exchange->handle);
  });
}

// Opens the memory of a peer in this process. Requires arena_mutex().
ab_status open_local(const Handle& peer, ab_exchange* exchange) {
  if (!is_live(peer.id)) return AB_INVALID("handles[%d]: got an exchange that was destroyed", peer.rank);
  const int device = exchange->arena.device;
  int accessible = 0;
  AB_RETURN_IF_CUDA_ERROR("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&accessible, device, peer.number));
  if (accessible == 0) {
    return error(AB_UNSUPPORTED, "exchange: device %d cannot access the memory of device %d, that of rank %d", device,
                 peer.number, peer.rank);
  }
  const cudaError_t failure = cudaDeviceEnablePeerAccess(peer.number, 0);
  if (failure == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clear it
  } else if (failure != cudaSuccess) {
    return failed("exchange: cudaDeviceEnablePeerAccess", failure);
  }
  exchange->group.flags[peer.rank] = static_cast<Flags*>(peer.flags);
  exchange->buffers[peer.rank] = static_cast<char*>(peer.buffers);
  return ok();
}

ab_status not_shared(const Handle& peer, cudaError_t failure) {
  cudaGetLastError();  // clear it
  return error(AB_UNSUPPORTED, "exchange: the memory of rank %d cannot be opened by another process: %s", peer.rank,
               cudaGetErrorString(failure));
}

// Opens the memory of a peer in another process. Its device need not be visible in this process.
ab_status open_foreign(const Handle& peer, ab_exchange* exchange) {
  if (peer.ipc_error != 0) return not_shared(peer, static_cast<cudaError_t>(peer.ipc_error));
  int number = 0;
  int accessible = 1;
  if (cudaDeviceGetByPCIBusId(&number, peer.pci) == cudaSuccess && number != exchange->arena.device) {
    AB_RETURN_IF_CUDA_ERROR("cudaDeviceCanAccessPeer",
                            cudaDeviceCanAccessPeer(&accessible, exchange->arena.device, number));
  }
  cudaGetLastError();  // clear it
  if (accessible == 0) {
    return error(AB_UNSUPPORTED, "exchange: device %s cannot access the memory of device %s, that of rank %d",
                 exchange->handle.pci, peer.pci, peer.rank);
  }
  cudaIpcMemHandle_t shared;
  void* flags = nullptr;
  std::memcpy(&shared, peer.flags_ipc, sizeof(shared));
  cudaError_t failure = cudaIpcOpenMemHandle(&flags, shared, cudaIpcMemLazyEnablePeerAccess);
  if (failure != cudaSuccess) return not_shared(peer, failure);
  void* buffers = nullptr;
  std::memcpy(&shared, peer.buffers_ipc, sizeof(shared));
  failure = cudaIpcOpenMemHandle(&buffers, shared, cudaIpcMemLazyEnablePeerAccess);
  if (failure != cudaSuccess) {
    cudaIpcCloseMemHandle(flags);
    return not_shared(peer, failure);
  }
  exchange->group.flags[peer.rank] = static_cast<Flags*>(flags);
  exchange->buffers[peer.rank] = static_cast<char*>(buffers);
  exchange->opened[peer.rank] = true;
  return ok();
}

// Closes what open_foreign() has opened. With `says_so` it sets Flags::left of the peers, as its last access.
void close_foreign(ab_exchange* exchange, bool says_so) {
  const int rank = exchange->shape.rank;
  constexpr Word kLeft = 1;
  for (int r = 0; r < exchange->shape.ranks; ++r) {
    if (!exchange->opened[r]) continue;
    cudaIpcCloseMemHandle(exchange->buffers[r]);
    Flags* const flags = exchange->group.flags[r];
    if (says_so) {
      cudaMemcpyAsync(&flags->left[rank], &kLeft, sizeof(kLeft), cudaMemcpyHostToDevice, exchange->arena.side);
      cudaStreamSynchronize(exchange->arena.side);
    }
    cudaIpcCloseMemHandle(flags);
    exchange->opened[r] = false;
  }
  cudaGetLastError();  // an error is that of an earlier kernel
}

// Allows every peer to write to all buffers. From here on calls of the peers may write to them. The copies also
// initialise what the driver needs for copies between these devices and inside this one.
ab_status release_first_use(const ab_exchange& exchange) {
  Word* const scratch = exchange.arena.flags->scratch;
  for (const size_t bytes : {size_t{3}, sizeof(Word)}) {
    AB_RETURN_IF_CUDA_ERROR(
        "copy", cudaMemcpyAsync(&scratch[1], &scratch[0], bytes, cudaMemcpyDeviceToDevice, exchange.arena.side));
  }
  for (int r = 0; r < exchange.shape.ranks; ++r) {
    if (r == exchange.shape.rank) continue;
    for (int b = 0; b < kBuffers; ++b) {
      AB_RETURN_IF_CUDA_ERROR(
          "copy to a peer",
          cudaMemcpyAsync(&exchange.group.flags[r]->released[b][exchange.shape.rank], &exchange.arena.flags->use[b],
                          sizeof(Word), cudaMemcpyDeviceToDevice, exchange.arena.side));
    }
  }
  AB_RETURN_IF_CUDA_ERROR("copy to a peer", cudaStreamSynchronize(exchange.arena.side));
  return ok();
}

// The peers whose memory open_local() and open_foreign() have opened.
Peers peers_of(const ab_exchange& exchange, const Handle (&handles)[kMaxRanks]) {
  Peers peers;
  for (int r = 0; r < exchange.shape.ranks; ++r) {
    if (r == exchange.shape.rank) continue;
    peers.foreign[r] = exchange.opened[r];
    if (!exchange.opened[r]) peers.local[r] = handles[r].id;
  }
  return peers;
}

ab_status connect(ab_exchange* exchange, const Handle (&handles)[kMaxRanks]) {
  std::lock_guard lock(arena_mutex());
  free_unused_arenas();
  return on_device(exchange->arena.device, [&] {
    exchange->group.flags[exchange->shape.rank] = exchange->arena.flags;
    exchange->buffers[exchange->shape.rank] = exchange->arena.buffers;
    ab_status status = ok();
    for (int r = 0; r < exchange->shape.ranks && status.code == AB_OK; ++r) {
      if (r == exchange->shape.rank) continue;
      status = exchange::is_same_process(handles[r], exchange->handle) ? open_local(handles[r], exchange)
                                                                       : open_foreign(handles[r], exchange);
    }
    if (status.code == AB_OK) status = release_first_use(*exchange);
    if (status.code != AB_OK) {
      close_foreign(exchange, false);
      return status;
    }
    set_peers(exchange->arena.id, peers_of(*exchange, handles));
    std::memcpy(exchange->handles, handles, sizeof(handles));
    exchange->connected = true;
    return ok();
  });
}

ab_status destroy(ab_exchange* exchange) {
  const ab_status status = on_device(exchange->arena.device, [&] {
    const cudaError_t failure = cudaDeviceSynchronize();
    close_foreign(exchange, true);
    return failure == cudaSuccess ? ok() : failed("exchange: the device failed before destroy", failure);
  });
  std::lock_guard lock(arena_mutex());
  retire(exchange->arena.id);
  free_unused_arenas();
  return status;
}

// A text of limited size. Lines that do not fit are truncated.
class Text {
 public:
  Text(char* chars, size_t size) : chars_(chars), size_(size) { chars_[0] = '\0'; }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list values;
    va_start(values, format);
    const int written = std::vsnprintf(chars_ + used_, size_ - used_, format, values);
    va_end(values);
    if (written > 0) used_ = std::min(used_ + static_cast<size_t>(written), size_ - 1);
  }

 private:
  char* chars_;
  size_t size_;
  size_t used_ = 0;
};

void describe_to(Text* text, const ab_exchange& exchange) {
  text->add("rank=%d of %d\ndevice=%d, %s\nbuffers=", exchange.shape.rank, exchange.shape.ranks, exchange.arena.device,
            exchange.handle.pci);
  for (const int64_t bytes : exchange.shape.buffer_bytes) text->add("%lld ", static_cast<long long>(bytes));
  text->add("bytes\ntimeout=%g s\n", static_cast<double>(exchange.group.limit) * 1e-9);
  for (int r = 0; r < exchange.shape.ranks && exchange.connected; ++r) {
    if (r == exchange.shape.rank) continue;
    const Handle& peer = exchange.handles[r];
    text->add("peer %d=device %d, %s, process %lld, by %s\n", r, peer.number, peer.pci,
              static_cast<long long>(peer.pid), exchange.opened[r] ? "cudaIpc" : "peer access");
  }
  const ab_status status = check_failure(exchange);
  const char* const state = exchange.connected ? "connected" : "not connected";
  text->add("status=%s\n", status.code == AB_OK ? state : status.message);
}

void describe_devices_to(Text* text) {
  int devices = 0;
  const cudaError_t failure = cudaGetDeviceCount(&devices);
  if (failure != cudaSuccess || devices == 0) {
    cudaGetLastError();  // clear it
    text->add("error=%s\n", failure == cudaSuccess ? "no device" : cudaGetErrorString(failure));
    return;
  }
  for (int device = 0; device < devices; ++device) {
    text->add("peer access from device %d=", device);
    const char* before = "";
    for (int peer = 0; peer < devices; ++peer) {
      int accessible = 0;
      if (peer == device || cudaDeviceCanAccessPeer(&accessible, device, peer) != cudaSuccess || accessible == 0) {
        continue;
      }
      text->add("%s%d", before, peer);
      before = ", ";
    }
    text->add("%s\n", before[0] == '\0' ? "none" : "");
  }
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

namespace {

ab_status check_not_null(const void* exchange) {
  if (exchange != nullptr) return ok();
  return AB_INVALID("exchange: got NULL, expected an exchange of ab_cuda_exchange_create");
}

}  // namespace

extern "C" ab_status ab_cuda_exchange_create(const ab_exchange_create_args* args, ab_exchange** exchange) {
  if (exchange == nullptr) return AB_INVALID("exchange: got NULL, expected a pointer to an ab_exchange*");
  *exchange = nullptr;
  ab_exchange_create_args taken;
  AB_RETURN_IF_ERROR(take_struct(args, &taken));
  std::unique_ptr<ab_exchange> made(new (std::nothrow) ab_exchange);
  if (made == nullptr) return error(AB_OUT_OF_MEMORY, "exchange: no host memory");
  const ab_status status = cuda::create(taken, made.get());
  if (status.code == AB_OK) {
    *exchange = made.release();
  } else if (made->arena.id != 0) {
    cuda::destroy(made.get());
  }
  return status;
}

extern "C" ab_status ab_cuda_exchange_export(const ab_exchange* exchange, void* handle) {
  AB_RETURN_IF_ERROR(check_not_null(exchange));
  if (handle == nullptr) return AB_INVALID("handle: got NULL, expected %d bytes", AB_EXCHANGE_HANDLE_BYTES);
  std::memset(handle, 0, AB_EXCHANGE_HANDLE_BYTES);
  std::memcpy(handle, &exchange->handle, sizeof(exchange->handle));
  return ok();
}

extern "C" ab_status ab_cuda_exchange_connect(ab_exchange* exchange, const void* handles, size_t bytes) {
  AB_RETURN_IF_ERROR(check_not_null(exchange));
  if (exchange->connected) return AB_INVALID("exchange: got an exchange that is connected, expected a new one");
  exchange::Handle all[exchange::kMaxRanks];
  AB_RETURN_IF_ERROR(exchange::check_handles(handles, bytes, exchange->handle, all));
  return cuda::connect(exchange, all);
}

extern "C" ab_status ab_cuda_exchange_buffer(const ab_exchange* exchange, int32_t buffer, void** data, int64_t* bytes) {
  AB_RETURN_IF_ERROR(check_not_null(exchange));
  AB_RETURN_IF_ERROR(exchange::check_buffer(buffer));
  if (data == nullptr || bytes == nullptr) return AB_INVALID("data, bytes: got NULL, expected pointers to results");
  if (!exchange->connected) return AB_INVALID("exchange: got an exchange that is not connected");
  *data = cuda::buffer_of(*exchange, exchange->shape.rank, buffer);
  *bytes = exchange->shape.buffer_bytes[buffer];
  return ok();
}

extern "C" ab_status ab_cuda_exchange_check(const ab_exchange* exchange) {
  AB_RETURN_IF_ERROR(check_not_null(exchange));
  return cuda::check_failure(*exchange);
}

extern "C" ab_status ab_cuda_exchange_destroy(ab_exchange* exchange) {
  if (exchange == nullptr) return ok();
  cuda::registry().remove(exchange);
  const ab_status status = cuda::destroy(exchange);
  delete exchange;
  return status;
}

extern "C" void ab_cuda_exchange_describe(const ab_exchange* exchange, char* text, size_t size) {
  if (text == nullptr || size == 0) return;
  cuda::Text lines(text, size);
  if (exchange == nullptr) {
    cuda::describe_devices_to(&lines);
  } else {
    cuda::describe_to(&lines, *exchange);
  }
}
