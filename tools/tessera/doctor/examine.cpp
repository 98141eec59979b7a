#include "tools/tessera/doctor/examine.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "comm/nccl.h"
#include "core/base/clock.h"
#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/plugin.h"
#include "core/base/processors.h"
#include "core/base/rng.h"
#include "core/base/system_memory.h"
#include "core/ops/attention.h"
#include "kernels/matmul.h"

namespace tessera::tools {
namespace {

constexpr const char* kDriverLibrary = "libcuda.so.1";

/// Value of "key: value" in a file like /proc/meminfo; empty if absent.
std::string proc_value(const char* file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t free_bytes_of(const std::filesystem::path& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) return -1;
  return static_cast<std::int64_t>(status.f_bavail) * static_cast<std::int64_t>(status.f_frsize);
}

/// @param plugin   expected path; may be absent
/// @param library  system library that the plugin needs
Library examine_library(const char* name, const std::filesystem::path& plugin, const char* library,
                        const char* cost) {
  Library out;
  out.name = name;
  out.cost = cost;
  std::error_code ignored;
  out.in_build = std::filesystem::exists(plugin, ignored);
  try {
    // Loads the library through the plugin's own search paths.
    if (out.in_build) const Plugin loaded(name, {}, nullptr, plugin.string());
    // The CUDA backend loads the driver library only when it starts, so probe it here.
    if (!out.in_build || std::string_view(library) == kDriverLibrary)
      const Plugin loaded("library", {}, nullptr, library);
    out.on_machine = true;
  } catch (const Unsupported& error) {
    out.problem = error.what();
  }
  return out;
}

/// The newest oneDNN of this machine.
const char* dnnl_library() {
  for (const char* name : {"libdnnl.so.3", "libdnnl.so.2"}) {
    void* const library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) continue;
    ::dlclose(library);
    return name;
  }
  return "libdnnl.so";
}

int count_gpus(Gpus& out, const std::filesystem::path& driver) {
  try {
    return count_devices();
  } catch (const Error&) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // NOLINT(concurrency-mt-unsafe)
    const bool hidden = visible != nullptr && (*visible == '\0' || *visible == '-');
    std::error_code ignored;
    out.driver_fails = has_device_backend() && !hidden && std::filesystem::exists(driver, ignored);
    throw;
  }
}

}  // namespace

Machine examine_machine(const std::filesystem::path& cgroup) {
  Machine out;
  out.processor = proc_value("/proc/cpuinfo", "model name");
  if (out.processor.empty()) out.processor = "unknown";
  out.level = detect_cpu_level();
  out.threads = this_process_processors(cgroup.string()).usable();
  const SystemMemory memory = system_memory(cgroup);
  out.memory_total = memory.total;
  out.memory_available = memory.available;
  struct rlimit files {};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    out.open_files = static_cast<std::int64_t>(files.rlim_cur);
  }
  out.shared_memory_free = free_bytes_of("/dev/shm");
  return out;
}

DirectoryState examine_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path at = std::filesystem::absolute(path, error);
  while (!std::filesystem::exists(at, error) && at.has_relative_path()) at = at.parent_path();
  DirectoryState out;
  out.free_bytes = free_bytes_of(at);
  if (!std::filesystem::is_directory(at, error)) {
    out.problem = fmt::format("{} is not a directory", at.string());
    return out;
  }
  // Write a file: permissions don't reveal a read-only or full file system.
  std::string probe = (at / ".tessera-doctor-XXXXXX").string();
  const int descriptor = ::mkstemp(probe.data());
  if (descriptor < 0) {
    out.problem = fmt::format("cannot create a file in {}: {}", at.string(), std::strerror(errno));
    return out;
  }
  out.writable = ::write(descriptor, "x", 1) == 1;
  if (!out.writable)
    out.problem = fmt::format("cannot write in {}: {}", at.string(), std::strerror(errno));
  ::close(descriptor);
  ::unlink(probe.c_str());
  return out;
}

std::vector<Library> examine_libraries() {
  const std::filesystem::path backend = Plugin::locate("libtessera_cuda.so", "TESSERA_CUDA_PLUGIN");
  // The cuDNN plugin is in the directory of the CUDA backend.
  const std::filesystem::path attention =
      backend.has_parent_path() ? backend.parent_path() / "libtessera_cudnn.so" : "";
  return {
      examine_library("CUDA backend", backend, kDriverLibrary, "GPUs are not used"),
      examine_library("cuDNN attention", attention, "libcudnn.so.9",
                      "attention on GPUs uses tessera's own, slower kernels"),
      examine_library("NCCL backend", Plugin::locate("libtessera_nccl.so", "TESSERA_NCCL_PLUGIN"),
                      "libnccl.so.2", "GPUs exchange data through host memory"),
      examine_library("oneDNN products",
                      Plugin::locate("libtessera_onednn.so", "TESSERA_ONEDNN_PLUGIN"),
                      dnnl_library(), "matrix products on the CPU use Eigen, which is slower")};
}

Gpus examine_gpus(const std::filesystem::path& driver) {
  Gpus out;
  try {
    const int count = count_gpus(out, driver);
    for (int index = 0; index < count; ++index) {
      const auto backend = load_device_backend(index);
      out.descriptions.push_back(fmt::format("cuda:{} {}", index, backend->description()));
    }
    const auto context = Context::create({.device = {DeviceType::CUDA, 0}});
    try {
      out.nccl = comm::open_nccl(*context)->version();
    } catch (const Error& error) {
      out.nccl_problem = error.what();
    }
    // Run a small attention with a head_dim of 64, so that the backend notes which kernel it uses.
    const Tensor qkv = Tensor::full(context, {1, 64, 3 * 64}, DType::BF16, 0.5);
    ops::attention(qkv, {.heads = 1});
    context->backend().synchronize();
    out.notes = context->backend().take_notes();
  } catch (const Error& error) {
    out.problem = error.what();
  }
  if (out.nccl.empty() && out.nccl_problem.empty()) out.nccl_problem = "there is no GPU for it";
  return out;
}

ProductResult examine_product(int threads, CpuLevel level) {
  constexpr std::int64_t kM = 384, kN = 768, kK = 512;
  const auto context = Context::create({.device = {}, .threads = threads, .cpu_level = level});
  std::vector<float> a(kM * kK), b(kK * kN), c(kM * kN);
  const auto key = RngKey::make(1, RngPurpose::Test, 0);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = uniform_from_bits(key.word(i)) - 0.5F;
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = uniform_from_bits(key.word(a.size() + i)) - 0.5F;

  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const auto start = std::chrono::steady_clock::now();
    kernels::matmul(*context, {.a = dense_view(a.data(), DType::F32, {kM, kK}),
                               .b = dense_view(b.data(), DType::F32, {kK, kN}),
                               .c = dense_view(c.data(), DType::F32, {kM, kN})});
    best = std::min(best, seconds_since(start));
  }

  ProductResult out;
  out.gflops = 2e-9 * static_cast<double>(kM * kN * kK) / best;
  // A stride of 97 rows and columns reaches all tiles and edges of a blocked matmul.
  for (std::int64_t i = 0; i < kM; i += 97) {
    for (std::int64_t j = 0; j < kN; j += 97) {
      double sum = 0;
      double scale = 0;
      for (std::int64_t k = 0; k < kK; ++k) {
        const double product = double{a[static_cast<std::size_t>(i * kK + k)]} *
                               double{b[static_cast<std::size_t>(k * kN + j)]};
        sum += product;
        scale += std::abs(product);
      }
      const double error = std::abs(double{c[static_cast<std::size_t>(i * kN + j)]} - sum) / scale;
      out.largest_error = std::isnan(error) ? error : std::max(out.largest_error, error);
    }
  }
  out.correct = out.largest_error < 1e-5;  // false for NaN; float32 rounding is about 1e-7
  return out;
}

}  // namespace tessera::tools
