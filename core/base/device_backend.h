#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/memory.h"
#include "core/base/system_memory.h"

namespace tessera {

class Context;

/// See Replay.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  virtual void run() = 0;
  /// Beside what the work whose memory it shares took.
  virtual std::size_t memory_bytes() const = 0;
};

/// What a device beside the CPU brings to a context: its memory, its kernels, and the order of what
/// runs on it. Comes from a plugin, a shared library that is loaded when a context asks for the
/// device, so that a program runs where the device's own libraries are missing.
///
/// Of one context, and used by its thread. Work is queued: it runs in the order of the calls, after
/// they have returned.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  /// "NVIDIA H100 80GB HBM3, compute capability 9.0"
  virtual std::string description() const = 0;
  /// The same for two backends only if they share a device; of CUDA the PCI bus id.
  virtual std::string device_id() const = 0;
  /// Of the device, with what this process and others hold of it; zeros if it doesn't tell.
  virtual SystemMemory memory() const = 0;
  virtual Allocator& allocator() = 0;
  /// Memory of the host that copies to and from the device reach without a detour.
  virtual Allocator& host_allocator() = 0;

  /// Starts the kernel of that name. `args` is the argument struct of its family, checked already.
  /// @return false if the backend has no such kernel
  virtual bool run_kernel(std::string_view name, Context& context, const void* args) = 0;

  /// Copies to the device; the source may change as soon as the call returns. Waits for the device
  /// only when more is under way than its staging holds.
  virtual void copy_from_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Waits for all work before it, and copies to the host.
  virtual void copy_to_host(void* to, const void* from, std::size_t bytes) = 0;
  /// Waits until all work is done.
  /// @throws CudaError if any of it failed
  virtual void synchronize() = 0;

  /// Waits for the device. From here to the matching end, work is kept instead of run, and copies
  /// to and from the host, marks and waits throw InternalError.
  /// @param within  of this backend: whose memory is shared; null: memory of its own
  virtual void begin_capture(const CapturedWork* within) = 0;
  /// Ends a part of what is captured, and goes on: work that runs between two parts has a place
  /// here. The memory of a part stays as long as that of the last, which end_capture() returns.
  /// @return null if nothing was queued since the capture began, or the last part ended
  /// @throws CudaError as end_capture(); the capture is to be abandoned then
  virtual std::unique_ptr<CapturedWork> end_part() = 0;
  /// @throws CudaError if something in between cannot be captured; nothing is kept then
  virtual std::unique_ptr<CapturedWork> end_capture() = 0;
  virtual void abandon_capture() noexcept = 0;

  /// What kernels are started on; the plugin alone knows its type.
  virtual void* stream() = 0;

  /// What was decided since the last call that a user may want to know: which of several kernels
  /// serves, and why.
  virtual std::vector<std::string> take_notes() = 0;

  /// Names the work that is queued from here to the matching end, for profilers; ranges nest.
  virtual void begin_range(const char* name) = 0;
  virtual void end_range() = 0;
  /// Marks a place in the order of the work. @return its number
  virtual std::size_t mark() = 0;
  /// When the work reached each mark, in milliseconds since the first; waits for all work, and
  /// forgets the marks.
  virtual std::vector<double> take_marks() = 0;
};

/// Loads the plugin and opens device `index`.
///
/// @param plugin  path of the shared library; empty: the file that the environment's
///   TESSERA_CUDA_PLUGIN names, else libtessera_cuda.so beside the program or in ../lib/tessera
/// @throws Unsupported naming what is missing (plugin, driver, device), or that the plugin was
///   built from other sources
std::unique_ptr<DeviceBackend> load_device_backend(int index, const std::string& plugin = {});

/// Whether there is a plugin's file at all, as load_device_backend() looks for it: a build without
/// the device's toolkit brings none.
bool has_device_backend();

/// How many devices the plugin can open; at least one.
/// @throws Unsupported naming what is missing, as load_device_backend does
int count_devices(const std::string& plugin = {});

/// Changes whenever a plugin and a program may not understand each other.
inline constexpr int kPluginVersion = 8;

}  // namespace tessera
