#include "core/base/processors.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <thread>

#include "core/base/control_groups.h"

namespace tessera {
namespace {

// 8,192 processors, the most that Linux supports. A cpu_set_t holds 1,024, and a kernel that may have
// more refuses to fill a single one.
using ProcessorSet = std::array<cpu_set_t, 8>;

// The processors of a process; empty if unknown.
std::vector<int> affinity(pid_t process) {
  std::vector<int> out;
  ProcessorSet set{};
  if (::sched_getaffinity(process, sizeof(set), set.data()) != 0) return out;
  for (std::size_t i = 0; i < 8 * sizeof(set); ++i) {
    if (CPU_ISSET_S(i, sizeof(set), set.data())) out.push_back(static_cast<int>(i));
  }
  return out;
}

// Reads "0-3,8,10-11".
std::vector<int> parse_processor_list(const std::string& text) {
  std::vector<int> out;
  const char *at = text.data(), *const end = at + text.size();
  while (at < end) {
    int first = 0;
    std::from_chars_result read = std::from_chars(at, end, first);
    int last = first;
    if (read.ptr < end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc()) return out;
    for (int i = first; i <= std::min(last, first + 4096); ++i) out.push_back(i);
    at = read.ptr < end && *read.ptr == ',' ? read.ptr + 1 : end;
  }
  return out;
}

// Processors' worth of time that a control group allows; 0: no limit.
double quota_of(const std::filesystem::path& group, ControlGroupVersion version) {
  double quota = 0, period = 0;
  if (version == ControlGroupVersion::V2) {
    std::ifstream(group / "cpu.max") >> quota >> period;  // "200000 100000" or "max 100000"
  } else {
    std::ifstream(group / "cpu.cfs_quota_us") >> quota;  // -1: no limit
    std::ifstream(group / "cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

std::vector<std::vector<int>> numa_nodes(const std::filesystem::path& directory) {
  std::vector<std::vector<int>> out;
  std::string text;
  std::getline(std::ifstream(directory / "online"), text);
  for (const int node : parse_processor_list(text)) {
    std::string list;
    std::getline(std::ifstream(directory / ("node" + std::to_string(node)) / "cpulist"), list);
    out.push_back(parse_processor_list(list));
  }
  return out;
}

}  // namespace

int Processors::usable() const {
  const auto count = static_cast<int>(allowed.size());
  return std::max(1, quota > 0 ? std::min(count, quota) : count);
}

int Processors::shared() const {
  const int count = std::max(static_cast<int>(allowed.size()), of_parent);
  return std::max(1, quota > 0 ? std::min(count, quota) : count);
}

Processors this_process_processors(const std::string& root, const std::string& membership,
                                   const std::string& nodes) {
  Processors out;
  out.allowed = affinity(0);
  if (out.allowed.empty()) {  // a sandbox that forbids the call
    out.allowed.resize(std::max(1U, std::thread::hardware_concurrency()));
    std::iota(out.allowed.begin(), out.allowed.end(), 0);
  }
  // A parent outside of this container is 0, which sched_getaffinity() takes for the caller.
  out.of_parent = static_cast<int>(affinity(::getppid()).size());
  double least = 0;
  for_each_control_group(root, membership, "cpu", [&](const auto& group, auto version) {
    const double quota = quota_of(group, version);
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  });
  out.quota = static_cast<int>(std::ceil(std::min(least, 1e6)));
  out.nodes = numa_nodes(nodes);
  return out;
}

int usable_processors() { return this_process_processors().usable(); }

ProcessorShare share_of_rank(const Processors& processors, int local_rank, int local_ranks) {
  const auto allowed = static_cast<int>(processors.allowed.size());
  ProcessorShare share;
  if (local_ranks < 2) {
    share.threads = processors.usable();
    return share;
  }
  share.threads = std::clamp(processors.shared() / local_ranks, 1, allowed);
  if (processors.of_parent > allowed) return share;

  std::vector<std::vector<int>> nodes;
  for (const std::vector<int>& node : processors.nodes) {
    std::vector<int> usable;
    std::ranges::set_intersection(node, processors.allowed, std::back_inserter(usable));
    if (!usable.empty()) nodes.push_back(std::move(usable));
  }
  const auto count = static_cast<int>(nodes.size());
  const auto is_even = [&](const std::vector<int>& node) {
    return node.size() == nodes.front().size();
  };
  if (count < 2 || !std::ranges::all_of(nodes, is_even)) return share;
  if (local_ranks % count != 0 && count % local_ranks != 0) return share;
  const int first = local_rank * count / local_ranks;
  for (int node = first; node < first + std::max(1, count / local_ranks); ++node) {
    const std::vector<int>& part = nodes[static_cast<std::size_t>(node)];
    share.processors.insert(share.processors.end(), part.begin(), part.end());
  }
  return share;
}

void bind_to_numa_nodes(int local_rank, int local_ranks) {
  const ProcessorShare share = share_of_rank(this_process_processors(), local_rank, local_ranks);
  if (share.processors.empty()) return;
  ProcessorSet set{};
  for (const int processor : share.processors) CPU_SET_S(processor, sizeof(set), set.data());
  ::sched_setaffinity(0, sizeof(set), set.data());  // a refusal costs speed alone
}

}  // namespace tessera
