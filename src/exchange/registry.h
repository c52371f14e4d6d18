// The exchanges of a process by name and device.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "anabranch/exchange.h"
#include "core/status.h"

namespace anabranch::exchange {

class Registry {
 public:
  ab_status add(std::string_view name, int device, ab_exchange* exchange) {
    if (name.empty()) return AB_INVALID("name: got an empty name, expected at least one character");
    std::lock_guard lock(mutex_);
    if (exchanges_.emplace(std::pair(std::string(name), device), exchange).second) return ok();
    return AB_INVALID("name: got \"%s\", which another exchange of device %d has, expected a new name",
                      beginning(name).c_str(), device);
  }

  // Removes all names of an exchange.
  void remove(const ab_exchange* exchange) {
    std::lock_guard lock(mutex_);
    std::erase_if(exchanges_, [&](const auto& entry) { return entry.second == exchange; });
  }

  ab_status find(std::string_view name, int device, ab_exchange** exchange) const {
    std::lock_guard lock(mutex_);
    const auto found = exchanges_.find(std::pair(std::string(name), device));
    if (found == exchanges_.end()) {
      return AB_INVALID(
          "exchange: got \"%s\" on device %d, expected one of the %zu exchanges of this process; either the program "
          "was compiled in another process and not traced in this one, or the exchange was destroyed",
          beginning(name).c_str(), device, exchanges_.size());
    }
    *exchange = found->second;
    return ok();
  }

 private:
  // The part of a name that fits an error message.
  static std::string beginning(std::string_view name) { return std::string(name.substr(0, 160)); }

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, ab_exchange*> exchanges_;
};

// The exchange with this name on the current device. Only the CUDA library has this function.
ab_status find_exchange(std::string_view name, ab_exchange** exchange);

// The rank of an exchange. Only the CUDA library has this function and the next one.
int32_t rank_of(const ab_exchange& exchange);

// See AB_EXCHANGE_ALL_BUFFERS.
ab_status abandon_calls(ab_exchange* exchange, void* stream);

}  // namespace anabranch::exchange
