#pragma once

#include <string>
#include <vector>

namespace tessera {

/// What a process may use of a host's processors.
struct Processors {
  std::vector<int> allowed{};  ///< by its affinity mask, ascending, 1 or more
  int of_parent = 0;  ///< number of those that the process that started it may use; 0: unknown
  int quota = 0;      ///< processors' worth of time of its control groups, rounded up; 0: no limit
  std::vector<std::vector<int>> nodes{};  ///< of the host, by NUMA node

  /// Number that this process can use at once, 1 or more.
  int usable() const;
  /// Number that the ranks of this host can use at once: if a launcher bound this one to a part of its
  /// own processors, such as srun, those of the launcher.
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

/// Divides processors among ranks that share them. If the nodes can be divided evenly, each rank
/// gets whole nodes, or a part of one; such ranks find their memory close by. A launcher such as srun
/// that gives each rank other processors has divided them, which the mask of the parent shows.
ProcessorShare share_of_rank(const Processors& processors, int local_rank, int local_ranks);

/// Binds the calling thread, and those that it starts from now on, to the rank's NUMA nodes, if
/// share_of_rank() says so.
void bind_to_numa_nodes(int local_rank, int local_ranks);

}  // namespace tessera
