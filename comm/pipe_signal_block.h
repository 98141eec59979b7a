#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace tessera::comm {

/// Keeps SIGPIPE from this thread for a scope, and from threads that are begun in it for good: Gloo
/// writes to peers that may be gone, and wants an error, not a signal.
class PipeSignalBlock {
 public:
  PipeSignalBlock() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~PipeSignalBlock() {
    // One that has come meanwhile would only wait for the end of the scope.
    constexpr timespec kNow{};
    if (!was_pending_) sigtimedwait(&pipe_, nullptr, &kNow);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlock(const PipeSignalBlock&) = delete;
  PipeSignalBlock& operator=(const PipeSignalBlock&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_;
};

}  // namespace tessera::comm
