#include <doctest/doctest.h>
#include <sched.h>

#include <filesystem>
#include <numeric>
#include <thread>

#include "core/base/processors.h"
#include "tests/support/temp_dir.h"

using namespace tessera;

namespace {

std::vector<int> numbers(int begin, int end) {
  std::vector<int> out(static_cast<std::size_t>(end - begin));
  std::iota(out.begin(), out.end(), begin);
  return out;
}

}  // namespace

TEST_CASE("processors are those of the affinity mask, at most the quota of control groups") {
  const test::TempDir dir;
  const auto write = [&](const std::string& folder, const std::string& file,
                         const std::string& text) {
    std::filesystem::create_directories(dir.file(folder));
    dir.write(folder + "/" + file, text);
  };
  const auto seen = [&](const std::string& membership) {
    return this_process_processors(dir.path(), dir.write("membership", membership),
                                   dir.file("nodes"));
  };
  cpu_set_t set;
  REQUIRE(::sched_getaffinity(0, sizeof(set), &set) == 0);
  const Processors free = seen("0::/\n");
  CHECK(static_cast<int>(free.allowed.size()) == CPU_COUNT(&set));
  CHECK(free.usable() == CPU_COUNT(&set));
  CHECK(free.quota == 0);
  CHECK(free.nodes.empty());

  std::thread([&] {  // its mask is its own
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(free.allowed.back(), &one);
    REQUIRE(::sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK(usable_processors() == 1);
  })
      .join();

  write("job", "cpu.max", "250000 100000\n");
  write("job/step", "cpu.max", "max 100000\n");
  CHECK(seen("0::/job/step\n").quota == 3);
  write("cpu/job", "cpu.cfs_quota_us", "-1\n");
  write("cpu/job", "cpu.cfs_period_us", "100000\n");
  CHECK(seen("3:cpu,cpuacct:/job\n").quota == 0);
  write("cpu/job", "cpu.cfs_quota_us", "50000\n");
  CHECK(seen("3:cpu,cpuacct:/job\n").quota == 1);
  CHECK(seen("3:cpu,cpuacct:/job\n").usable() == 1);

  write("nodes", "online", "0,2\n");
  write("nodes/node0", "cpulist", "0-1,8\n");
  write("nodes/node2", "cpulist", "2-3\n");
  CHECK(seen("0::/\n").nodes == std::vector<std::vector<int>>{{0, 1, 8}, {2, 3}});
}

TEST_CASE("ranks divide the processors of a host, and keep to its NUMA nodes") {
  const std::vector<std::vector<int>> two_nodes = {numbers(0, 8), numbers(8, 16)};
  const Processors host{.allowed = numbers(0, 16), .of_parent = 16, .nodes = two_nodes};
  CHECK(share_of_rank(host, 0, 1).threads == 16);
  CHECK(share_of_rank(host, 0, 1).processors.empty());
  for (const int rank : {0, 1}) {
    CHECK(share_of_rank(host, rank, 2).threads == 8);
    CHECK(share_of_rank(host, rank, 2).processors == two_nodes[static_cast<std::size_t>(rank)]);
  }
  CHECK(share_of_rank(host, 1, 4).processors == two_nodes[0]);
  CHECK(share_of_rank(host, 2, 4).processors == two_nodes[1]);
  CHECK(share_of_rank(host, 2, 4).threads == 4);
  CHECK(share_of_rank(host, 2, 3).processors.empty());
  CHECK(share_of_rank(host, 0, 64).threads == 1);

  Processors four_nodes = host;
  four_nodes.nodes = {numbers(0, 4), numbers(4, 8), numbers(8, 12), numbers(12, 16)};
  CHECK(share_of_rank(four_nodes, 1, 2).processors == numbers(8, 16));

  Processors limited = host;  // a container
  limited.quota = 4;
  CHECK(share_of_rank(limited, 0, 1).threads == 4);
  CHECK(share_of_rank(limited, 0, 2).threads == 2);
  limited.allowed = numbers(6, 10);  // uneven parts of the nodes are even here
  limited.of_parent = 4;
  CHECK(share_of_rank(limited, 1, 2).processors == numbers(8, 10));
  limited.allowed = numbers(6, 9);
  CHECK(share_of_rank(limited, 1, 2).processors.empty());

  Processors bound = host;  // by srun, to 4 of 16
  bound.allowed = numbers(4, 8);
  CHECK(share_of_rank(bound, 1, 4).threads == 4);
  CHECK(share_of_rank(bound, 1, 2).threads == 4);
  CHECK(share_of_rank(bound, 1, 4).processors.empty());
}
