#pragma once

#include <string>
#include <vector>

namespace tessera {

/// Processors of a host that a process may use.
struct Processors {
  std::vector<int> allowed{};  ///< by its affinity mask, ascending, 1 or more
  int of_parent = 0;  ///< number of processors in the mask of its parent process; 0: unknown
  int quota = 0;      ///< processors' worth of time of its control groups, rounded up; 0: no limit
  std::vector<std::vector<int>> nodes{};  ///< of the host, by NUMA node

  /// Number that this process can use at once, 1 or more.
  int usable() const;
  /// Number that all ranks of this host can use at once. If the parent process has more processors, it
  /// counts as a launcher, such as srun, that gave each rank a part of its own.
  int shared() const;
};

/// @param root, membership  see for_each_control_group()
/// @param nodes             directory of NUMA nodes; may be absent
Processors this_process_processors(const std::string& root = "/sys/fs/cgroup",
                                   const std::string& membership = "/proc/self/cgroup",
                                   const std::string& nodes = "/sys/devices/system/node");
/// Number of processors that this process can use at once, 1 or more.
int usable_processors();

/// One rank's part of a host's processors.
struct ProcessorShare {
  int threads = 1;                ///< that can run at once
  std::vector<int> processors{};  ///< of the rank's NUMA nodes, to bind it to; empty: no binding
};

/// Divides the processors of a host among its ranks. Where NUMA nodes divide evenly, each rank gets whole
/// nodes, or shares one, so that its memory is local. Ranks with fewer processors than their parent
/// process count as bound by the launcher, to other processors each: they stay so.
/// @param local_rank  from 0, below local_ranks
ProcessorShare share_of_rank(const Processors& processors, int local_rank, int local_ranks);

/// Binds the calling thread, and those that it starts from now on, to the rank's NUMA nodes, if
/// share_of_rank() says so.
void bind_to_numa_nodes(int local_rank, int local_ranks);

}  // namespace tessera
