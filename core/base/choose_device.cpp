#include "core/base/choose_device.h"

#include <charconv>
#include <string_view>

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/processors.h"

namespace tessera {

std::optional<int> parse_device(const std::string& wanted) {
  if (wanted == "auto" || wanted == "cpu" || wanted == "cuda") return std::nullopt;
  constexpr std::string_view kPrefix = "cuda:";
  int index = -1;
  const char* const end = wanted.data() + wanted.size();
  if (wanted.starts_with(kPrefix)) {
    const auto result = std::from_chars(wanted.data() + kPrefix.size(), end, index);
    if (result.ec != std::errc() || result.ptr != end) index = -1;
  }
  require(index >= 0, "the device must be auto, cpu, cuda or cuda:N, got '{}'", wanted);
  return index;
}

ChosenDevice open_device(const std::string& wanted, int local_rank, int threads, int local_ranks) {
  const auto open = [&](Device device) {
    return Context::create({.device = device, .threads = threads});
  };
  const auto open_cpu = [&] {
    bind_to_numa_nodes(local_rank, local_ranks);
    return open({});
  };
  const auto own_gpu = [&] { return open({DeviceType::CUDA, local_rank % count_devices()}); };
  if (const auto index = parse_device(wanted)) return {open({DeviceType::CUDA, *index})};
  if (wanted == "cpu") return {open_cpu()};
  if (wanted == "cuda") return {own_gpu()};
  try {
    return {own_gpu()};
  } catch (const Unsupported& error) {
    return {open_cpu(), error.what()};
  }
}

}  // namespace tessera
