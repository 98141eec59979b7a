#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/kernel_work.h"

namespace tessera {

/// Seconds of a kernel: those of a call, and of each operation and byte.
struct KernelRate {
  double call = 0, flop = 0, read = 0, written = 0;

  double seconds(const KernelWork& work) const {
    return call + flop * work.flops + read * work.read + written * work.written;
  }
};

/// A kernel's time in a profile.
struct KernelTime {
  std::string kernel;
  KernelWork work;
  double seconds = 0;
};

/// How fast a device runs each kernel, for a plan's time.
class KernelRates {
 public:
  KernelRates() = default;
  /// @param others  of kernels without a rate of their own
  KernelRates(std::map<std::string, KernelRate, std::less<>> rates, KernelRate others)
      : rates_(std::move(rates)), others_(others) {}
  /// Fits rates to measured kernels, by least squares of relative errors; each call's time is the median of
  /// the calls with the same work. Kernels with operations take time for them and, if they have three works or
  /// more, for bytes; others for bytes and calls. Kernels that are not among them take what all together do.
  /// @param gap  seconds between a kernel and the next; added to each call
  static KernelRates fit(std::span<const KernelTime> times, double gap);

  /// Whether the kernel has a rate of its own.
  bool knows(std::string_view kernel) const { return rates_.contains(kernel); }
  double seconds(std::string_view kernel, const KernelWork& work) const;

 private:
  std::map<std::string, KernelRate, std::less<>> rates_;
  KernelRate others_;
};

}  // namespace tessera
