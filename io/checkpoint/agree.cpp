#include "io/checkpoint/agree.h"

#include <algorithm>
#include <string_view>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::string_view kOk = "ok\n";
constexpr std::string_view kError = "error\n";
// Errors travel as the rest does: through channels that bound what they carry.
constexpr std::size_t kMaxErrorBytes = 2048;
// More failures than this are counted, not told.
constexpr int kToldFailures = 4;

}  // namespace

std::vector<std::string> agree(const SaveRequest& request, SaveCoordinator& coordinator,
                               const std::string& phase, const Failure& failure,
                               const std::function<std::string()>& share) {
  std::string mine;
  try {
    mine = std::string(kOk) + share();
  } catch (const std::exception& error) {
    mine = std::string(kError) + std::string(error.what()).substr(0, kMaxErrorBytes);
  }
  if (request.pulse) request.pulse->fetch_add(1, std::memory_order_relaxed);
  auto all = coordinator.exchange(phase, mine);
  require<InternalError>(all.size() == static_cast<std::size_t>(request.world_size),
                         "{}: {} answers from {} ranks", phase, all.size(), request.world_size);
  std::string failures;
  int failed = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].starts_with(kOk)) {
      all[rank].erase(0, kOk.size());
    } else if (++failed <= kToldFailures) {
      failures += fmt::format("{}rank {}: {}", failures.empty() ? "" : "; ", rank,
                              all[rank].substr(std::min(kError.size(), all[rank].size())));
    }
  }
  if (failed > kToldFailures) failures += fmt::format("; and {} more", failed - kToldFailures);
  require<IoError>(failures.empty(), "{}: {}; {}", failure.failed, failures, failure.then);
  return all;
}

}  // namespace tessera::io
