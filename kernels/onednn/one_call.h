#pragma once

#include <omp.h>
#include <signal.h>

namespace tessera::kernels::onednn {

/// One thread for oneDNN's loops on this thread: tessera's threads divide the work.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

/// Blocks signals on this thread: some of oneDNN's AVX-512 kernels point the stack register into a
/// buffer on the heap, and a signal handler's frame below it would overwrite other allocations.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tessera::kernels::onednn
