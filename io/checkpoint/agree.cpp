#include "io/checkpoint/agree.h"

#include <string_view>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::string_view kOk = "ok\n";
constexpr std::string_view kError = "error\n";
constexpr std::string_view kDamaged = "damaged\n";
// Limits the error text of a rank, because the coordinator limits the size of a message.
constexpr std::size_t kMaxErrorBytes = 2048;
// Maximum number of failures in the error text, which then says how many more there are.
constexpr int kToldFailures = 4;

}  // namespace

std::vector<std::string> agree(const SaveRequest& request, SaveCoordinator& coordinator,
                               const std::string& phase, const Failure& failure,
                               const std::function<std::string()>& share) {
  std::string mine;
  const auto fail = [&](std::string_view kind, const std::exception& error) {
    mine = std::string(kind) + std::string(error.what()).substr(0, kMaxErrorBytes);
  };
  try {
    mine = std::string(kOk) + share();
  } catch (const CorruptCheckpoint& error) {
    fail(kDamaged, error);
  } catch (const std::exception& error) {
    fail(kError, error);
  }
  if (request.pulse) request.pulse->fetch_add(1, std::memory_order_relaxed);
  auto all = coordinator.exchange(phase, mine);
  require<InternalError>(all.size() == static_cast<std::size_t>(request.world_size),
                         "{}: {} answers from {} ranks", phase, all.size(), request.world_size);
  std::string failures;
  int failed = 0;
  bool damaged = false;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].starts_with(kOk)) {
      all[rank].erase(0, kOk.size());
      continue;
    }
    damaged = damaged || all[rank].starts_with(kDamaged);
    if (++failed <= kToldFailures) {
      const std::string why = all[rank].substr(all[rank].find('\n') + 1);
      failures += fmt::format("{}rank {}: {}", failures.empty() ? "" : "; ", rank, why);
    }
  }
  if (failures.empty()) return all;
  if (failed > kToldFailures) failures += fmt::format("; and {} more", failed - kToldFailures);
  const std::string text = fmt::format("{}: {}; {}", failure.failed, failures, failure.then);
  if (damaged) throw FoundDamage(text);
  throw IoError("{}", text);
}

}  // namespace tessera::io
