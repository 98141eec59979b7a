#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/device.h"
#include "core/base/memory.h"
#include "core/base/system_memory.h"

namespace tessera {

class Context;
class ProductTuning;

/// A device other than the CPU: memory, kernels and one stream of work. Implemented by a plugin, a
/// shared library loaded on demand, so that programs start where the device's libraries are
/// missing.
///
/// Belongs to one context and its thread. Calls queue work, which runs asynchronously in call
/// order.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// "NVIDIA H100 80GB HBM3, compute capability 9.0"
  virtual std::string description() const = 0;
  /// Unique per device: for CUDA the PCI bus id.
  virtual std::string device_id() const = 0;
  /// The device's memory; zeros if unknown.
  virtual SystemMemory memory() const = 0;
  virtual DeviceLimits limits() const = 0;
  virtual Allocator& allocator() = 0;
  /// Page-locked host memory.
  virtual Allocator& host_allocator() = 0;

  /// Queues a kernel. `args` points to the valid argument struct of the kernel's family.
  /// @return false if the backend has no such kernel
  virtual bool run_kernel(std::string_view name, Context& context, const void* args) = 0;

  /// Choice of a library's kernels for matrix products.
  virtual ProductTuning& product_tuning() = 0;

  /// Queues a copy to the device; the source may change as soon as the call returns. Waits for the
  /// device only when its staging buffers are full.
  virtual void copy_from_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Waits for all queued work, and copies to the host.
  virtual void copy_to_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Waits for all queued work.
  /// @throws CudaError if any work failed
  virtual void synchronize() = 0;

  /// Stream that kernels are launched on, of the plugin's own type.
  virtual void* stream() = 0;

  /// Messages for the user since the last call, such as which of several kernels was chosen and
  /// why.
  virtual std::vector<std::string> take_notes() = 0;

  /// Names work queued from here to the matching end_range(), for profilers; ranges nest.
  virtual void begin_range(const char* name) = 0;
  virtual void end_range() = 0;
  /// Queues a timestamp. @return its index
  virtual std::size_t mark() = 0;
  /// Waits, and returns all timestamps in milliseconds since the first; clears them.
  virtual std::vector<double> take_marks() = 0;
};

/// Loads the plugin and opens device `index`.
///
/// @param plugin  path of the shared library; empty: the environment's TESSERA_CUDA_PLUGIN, else
///   libtessera_cuda.so next to the program or in ../lib/tessera, if there seems to be a driver
/// @throws Unsupported naming the missing plugin, driver or device, or a plugin of another version
std::unique_ptr<DeviceBackend> load_device_backend(int index, const std::string& plugin = {});

/// Whether load_device_backend() would find a plugin file.
bool has_device_backend();

/// Number of devices that the plugin can open; at least one.
/// @throws Unsupported as load_device_backend() does
int count_devices(const std::string& plugin = {});

/// Version of the interface between program and plugin.
inline constexpr int kPluginVersion = 14;

}  // namespace tessera
