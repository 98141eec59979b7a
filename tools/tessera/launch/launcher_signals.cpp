#include "tools/tessera/launch/launcher_signals.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/error.h"

namespace tessera::tools {

LauncherSignals::LauncherSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&set, signal);
  fd_ = comm::FileDescriptor(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  require<IoError>(fd_.get() >= 0, "signalfd failed: {}", std::strerror(errno));
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, &child_before_);
}

LauncherSignals::~LauncherSignals() {
  ::sigaction(SIGCHLD, &child_before_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

LauncherSignals::Signal LauncherSignals::next() const {
  signalfd_siginfo info;
  while (::read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGCHLD)
      return {static_cast<int>(info.ssi_signo), info.ssi_code == SI_KERNEL};
  }
  return {};
}

sigset_t LauncherSignals::mask_of_ranks(bool blocks_warnings) const {
  sigset_t mask = before_;
  if (blocks_warnings) sigaddset(&mask, SIGUSR1);
  return mask;
}

}  // namespace tessera::tools
