#include <dnnl.h>
#include <omp.h>
#include <signal.h>

#include <string>

#include "kernels/product_library.h"

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

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

}  // namespace

TESSERA_EXPORT int tessera_onednn_plugin_version() {
  return tessera::kernels::kProductPluginVersion;
}

TESSERA_EXPORT const char* tessera_onednn_name() {
  static const std::string name = [] {
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch);
  }();
  return name.c_str();
}

TESSERA_EXPORT bool tessera_onednn_sgemm(char op_a, char op_b, std::int64_t m, std::int64_t n,
                                         std::int64_t k, const float* a, std::int64_t a_stride,
                                         const float* b, std::int64_t b_stride, float beta,
                                         float* c, std::int64_t c_stride) {
  const OneThread one_thread;
  const BlockedSignals blocked_signals;
  return dnnl_sgemm(op_a, op_b, m, n, k, 1.0F, a, a_stride, b, b_stride, beta, c, c_stride) ==
         dnnl_success;
}
