#include "tools/tessera/signal/stop_signal.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace tessera::tools {
namespace {

volatile std::sig_atomic_t received_signal = 0;
std::atomic<std::int64_t> received_at = 0;  // ms of the monotonic clock
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a handler must not wait");
constexpr std::array kSignals = {SIGINT, SIGTERM, SIGUSR1};
constexpr std::int64_t kSameRequest = 1000;  // ms

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

void handle(int signal) {
  const bool warned = received_signal == SIGUSR1;
  if (signal == SIGUSR1 && received_signal != 0) return;
  if (received_signal == 0 || warned) {
    received_at = now();
    received_signal = signal;
  } else if (now() - received_at >= kSameRequest) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

int stop_exit_code(int signal) { return 128 + (signal == SIGUSR1 ? SIGTERM : signal); }

HeldWarnings::HeldWarnings() {
  received_signal = 0;
  std::signal(SIGUSR1, handle);
  sigset_t warnings;
  sigemptyset(&warnings);
  sigaddset(&warnings, SIGUSR1);
  ::pthread_sigmask(SIG_UNBLOCK, &warnings, nullptr);
}

HeldWarnings::~HeldWarnings() {
  std::signal(SIGUSR1, SIG_IGN);
  received_signal = 0;
}

StopSignal::StopSignal() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) before_[i] = std::signal(kSignals[i], handle);
}

StopSignal::~StopSignal() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) std::signal(kSignals[i], before_[i]);
  received_signal = 0;
}

int StopSignal::received() const { return received_signal; }

}  // namespace tessera::tools
