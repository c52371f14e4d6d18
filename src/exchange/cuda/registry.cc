// Names of exchanges: ab_cuda_exchange_register.
#include "exchange/cuda/registry.h"

#include "core/cuda/launch.h"
#include "exchange/cuda/exchange.h"
#include "exchange/cuda/steps.h"

namespace anabranch::cuda {

exchange::Registry& registry() {
  static exchange::Registry* const all = new exchange::Registry;  // calls may come until the process ends
  return *all;
}

}  // namespace anabranch::cuda

namespace anabranch::exchange {

ab_status find_exchange(std::string_view name, ab_exchange** exchange) {
  int device = 0;
  AB_RETURN_IF_CUDA_ERROR("cudaGetDevice", cudaGetDevice(&device));
  return cuda::registry().find(name, device, exchange);
}

int32_t rank_of(const ab_exchange& exchange) { return exchange.shape.rank; }

ab_status abandon_calls(ab_exchange* exchange, void* stream) {
  return cuda::abandon(exchange, static_cast<cudaStream_t>(stream));
}

}  // namespace anabranch::exchange

using namespace anabranch;

extern "C" ab_status ab_cuda_exchange_register(ab_exchange* exchange, const char* name) {
  if (exchange == nullptr) return AB_INVALID("exchange: got NULL, expected an exchange of ab_cuda_exchange_create");
  if (!exchange->connected) return AB_INVALID("exchange: got an exchange that is not connected");
  if (name == nullptr) return AB_INVALID("name: got NULL, expected a text");
  return cuda::registry().add(name, exchange->arena.device, exchange);
}
