#include "tools/tessera/signal/stop_signal.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace tessera::tools {
namespace {

volatile std::sig_atomic_t received_signal = 0;
std::atomic<std::int64_t> received_at = 0;  // ms of the monotonic clock
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a handler must not wait");
constexpr std::int64_t kSameRequest = 1000;  // ms

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

void handle(int signal) {
  if (received_signal == 0) {
    received_at = now();
    received_signal = signal;
  } else if (now() - received_at >= kSameRequest) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  std::signal(SIGINT, handle);
  std::signal(SIGTERM, handle);
}

StopSignal::~StopSignal() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int StopSignal::received() const { return received_signal; }

}  // namespace tessera::tools
