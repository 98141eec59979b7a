#include "tools/tessera/train/tell_others.h"

#include <fmt/format.h>

#include <new>

#include "comm/control/agreement.h"
#include "core/base/error.h"

namespace tessera::tools {

bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept {
  if (dynamic_cast<const CommError*>(&error) != nullptr ||
      dynamic_cast<const NonFiniteLoss*>(&error) != nullptr)
    return false;
  const bool memory = dynamic_cast<const OutOfMemory*>(&error) != nullptr ||
                      dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  try {
    const std::string_view what = error.what();
    CommError verdict(CommFailure::PeerLost, {rank}, "rank {} ({}) {}: {}", rank, process,
                      memory ? "is out of memory" : "ended by an error",
                      what.substr(0, what.find('\n')));  // without the ledger
    comm::publish_verdict(store, verdict.set_fate(memory ? "out of memory" : "error"));
  } catch (const std::exception&) {
    // Keep the first error.
  }
  return true;
}

}  // namespace tessera::tools
