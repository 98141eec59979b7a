#include "tools/tessera/signal/stop_signal.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <string_view>

namespace tessera::tools {
namespace {

using Stage = StopSignal::Stage;

volatile std::sig_atomic_t received_signal = 0;
std::atomic<std::int64_t> received_at = 0;  // ms of the monotonic clock
std::atomic<bool> answers_signals = false;
std::atomic<bool> on_terminal = false;
std::atomic<Stage> current_stage = Stage::Loading;
std::atomic<std::int64_t> current_step = 0, newest_saved = -1;
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a signal handler must not block");
constexpr std::array kSignals = {SIGINT, SIGTERM, SIGUSR1};
constexpr std::int64_t kSameRequest = 1000;  // ms

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

// Async-signal-safe message: no allocation, no locks.
class Answer {
 public:
  Answer& add(std::string_view text) {
    for (const char c : text)
      if (size_ < text_.size()) text_[size_++] = c;
    return *this;
  }
  Answer& add(std::int64_t number) {
    std::array<char, 20> digits{};
    std::size_t first = digits.size();
    do digits[--first] = static_cast<char>('0' + number % 10);
    while ((number /= 10) > 0);
    return add({digits.data() + first, digits.size() - first});
  }
  // Drops the text if standard error is unread, because a handler must not block.
  void write() const {
    pollfd output{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&output, 1, 0) == 1 && (output.revents & POLLOUT) != 0) [[maybe_unused]]
      const ssize_t written = ::write(STDERR_FILENO, text_.data(), size_);
  }

 private:
  std::array<char, 256> text_{};
  std::size_t size_ = 0;
};

void answer_first(int signal) {
  const Stage stage = current_stage;
  Answer answer;
  answer.add(on_terminal ? "\r\x1b[K" : "").add("tessera: stopping ");
  answer.add(stage == Stage::Loading ? "as soon as the run has loaded"
             : stage == Stage::Training
                 ? "after this step, then saving"
                 : "after this step; checkpoint.every is 0: nothing is saved");
  if (signal != SIGUSR1)
    answer.add(signal == SIGINT ? "; press Ctrl-C again" : "; send SIGTERM again")
        .add(stage == Stage::Training ? " to quit without saving" : " to quit at once");
  answer.add("\n").write();
}

void answer_second() {
  Answer answer;
  answer.add(on_terminal ? "\r\x1b[K" : "").add("tessera: quitting at once; ");
  const std::int64_t saved = newest_saved, lost = current_step - (saved < 0 ? 0 : saved);
  const std::string_view steps = lost == 1 ? " step" : " steps";
  if (lost <= 0 || current_stage == Stage::Loading)
    answer.add("no step is lost");
  else if (saved < 0)
    answer.add("lost: ").add(lost).add(steps).add(", no checkpoint exists");
  else
    answer.add("lost: ")
        .add(lost)
        .add(steps)
        .add(" since the newest checkpoint, of step ")
        .add(saved);
  answer.add("\n").write();
}

void handle(int signal) {
  const int error = errno;
  const bool warned = received_signal == SIGUSR1;
  if (signal == SIGUSR1 && received_signal != 0) return;
  if (received_signal == 0 || warned) {
    received_at = now();
    received_signal = signal;
    if (answers_signals) answer_first(signal);
  } else if (now() - received_at >= kSameRequest) {
    if (answers_signals) answer_second();
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  errno = error;
}

}  // namespace

int stop_exit_code(int signal) { return 128 + (signal == SIGUSR1 ? SIGTERM : signal); }

void mask_warnings(int how) {
  sigset_t warnings;
  sigemptyset(&warnings);
  sigaddset(&warnings, SIGUSR1);
  ::pthread_sigmask(how, &warnings, nullptr);
}

HeldWarnings::HeldWarnings() {
  received_signal = 0;
  std::signal(SIGUSR1, handle);
  mask_warnings(SIG_UNBLOCK);
}

HeldWarnings::~HeldWarnings() {
  std::signal(SIGUSR1, SIG_IGN);
  received_signal = 0;
}

StopSignal::StopSignal(bool answers) {
  set_progress(Stage::Loading, 0);
  set_saved(-1);
  on_terminal = ::isatty(STDERR_FILENO) == 1;
  answers_signals = answers;
  for (std::size_t i = 0; i < kSignals.size(); ++i) before_[i] = std::signal(kSignals[i], handle);
}

StopSignal::~StopSignal() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) std::signal(kSignals[i], before_[i]);
  answers_signals = false;
  received_signal = 0;
}

int StopSignal::received() const { return received_signal; }

void StopSignal::set_saved(std::int64_t step) { newest_saved = step; }

void StopSignal::set_progress(Stage stage, std::int64_t step) {
  current_step = step;
  current_stage = stage;
}

}  // namespace tessera::tools
