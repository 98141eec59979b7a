#include "tools/tessera/train/stop_signal.h"

#include <csignal>

namespace tessera::tools {
namespace {

volatile std::sig_atomic_t received_signal = 0;

void handle(int signal) {
  received_signal = signal;
  std::signal(signal, SIG_DFL);
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
