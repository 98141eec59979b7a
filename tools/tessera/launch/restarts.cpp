#include "tools/tessera/launch/restarts.h"

#include <fmt/format.h>
#include <poll.h>

#include "comm/control/socket.h"
#include "tools/tessera/command.h"
#include "tools/tessera/signal/stop_signal.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostBarren = 2;  // consecutive failures without a new checkpoint

// Waits for `time` or until a signal arrives. @return the signal, or 0
int pause(const LauncherSignals& signals, std::chrono::milliseconds time) {
  const auto end = Clock::now() + time;
  for (;;) {
    if (const int signal = signals.next().number; signal != 0) return signal;
    const int left = comm::milliseconds_until(end);
    if (left <= 0) return 0;
    pollfd polled{signals.fd(), POLLIN, 0};
    ::poll(&polled, 1, left);
  }
}

// The largest allowed number of ranks below `nproc`; 0: none.
int fewer_ranks(const RestartOptions& restarts, int nproc) {
  if (restarts.min_nproc <= 0) return 0;
  for (int fewer = nproc - 1; fewer >= restarts.min_nproc; --fewer)
    if (restarts.fits(fewer)) return fewer;
  return 0;
}

}  // namespace

int launch_with_restarts(int nproc, const std::vector<std::string>& argv,
                         const RestartOptions& restarts, const LaunchOptions& options) {
  const LauncherSignals signals;
  std::vector<std::string> arguments = argv;
  std::optional<std::int64_t> step = restarts.newest_step();
  int barren = 0;
  int former_culprit = -1;
  for (int restart = 1;; ++restart) {
    const LaunchOutcome outcome = launch(nproc, arguments, options, signals);
    if (!outcome.failed || outcome.signal != 0 || outcome.code == kUsage) return outcome.code;
    const std::string& failure = outcome.failure;
    if (restart > restarts.restarts) {
      if (restarts.restarts > 0) {
        say(options, fmt::format("{}; giving up after {} restart{}", failure, restarts.restarts,
                                 restarts.restarts == 1 ? "" : "s"));
      }
      return outcome.code;
    }
    const std::optional<std::int64_t> newest = restarts.newest_step();
    const bool progress = newest > step;  // nullopt is less than any step
    barren = progress ? 0 : barren + 1;
    std::string size;
    if (!progress && outcome.culprit >= 0 && outcome.culprit == former_culprit) {
      if (const int fewer = fewer_ranks(restarts, nproc); fewer > 0) {
        size = fmt::format(" with {} rank{} instead of {}", fewer, fewer == 1 ? "" : "s", nproc);
        nproc = fewer;
        barren = 0;
      }
    }
    if (barren >= kMostBarren) {
      say(options, fmt::format("{}; giving up: no checkpoint was committed between the "
                               "last {} failures",
                               failure, barren));
      return outcome.code;
    }
    step = newest;
    former_culprit = size.empty() ? outcome.culprit : -1;
    arguments = restarts.arguments(newest.has_value());
    say(options, fmt::format("restart {} of {}: {}; {}{}", restart, restarts.restarts, failure,
                             newest ? fmt::format("resuming from step {}", *newest)
                                    : std::string("starting from scratch, no checkpoint yet"),
                             size));
    if (const int signal = pause(signals, restarts.pause); signal != 0) {
      say(options, fmt::format("stopped by signal {} before the restart", signal));
      return stop_exit_code(signal);
    }
  }
}

}  // namespace tessera::tools
