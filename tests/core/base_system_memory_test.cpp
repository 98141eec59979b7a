#include <doctest/doctest.h>

#include "core/base/system_memory.h"
#include "tests/support/temp_dir.h"

using namespace tessera;

TEST_CASE("system memory is the minimum of machine and container limit") {
  const test::TempDir dir;
  const SystemMemory whole = system_memory(dir.path(), "/dev/null");
  CHECK(whole.total > 16 << 20);
  CHECK(whole.available > 0);
  CHECK(whole.available <= whole.total);

  dir.write("memory.max", "50000000\n");
  dir.write("memory.current", "49000000\n");
  CHECK(system_memory(dir.path(), "/dev/null").total == 50'000'000);
  CHECK(system_memory(dir.path(), "/dev/null").available == 1'000'000);
  dir.write("memory.stat", "anon 9000000\ninactive_file 2000000\nactive_file 5\n");
  CHECK(system_memory(dir.path(), "/dev/null").available == 3'000'000);
  dir.write("memory.current", "52000001\n");  // briefly over the limit
  CHECK(system_memory(dir.path(), "/dev/null").available == 0);
  dir.write("memory.max", "max\n");
  CHECK(system_memory(dir.path(), "/dev/null").total == whole.total);
}

TEST_CASE("with nested control groups the smallest limit counts, in v1 and v2") {
  const test::TempDir dir;
  const auto in = [&](const std::string& group, const std::string& file, const std::string& text) {
    std::filesystem::create_directories(dir.file(group));
    dir.write(group + "/" + file, text);
  };
  const auto seen = [&](const std::string& membership) {
    return system_memory(dir.path(), dir.write("membership", membership));
  };
  in("job/step", "memory.max", "max\n");
  in("job", "memory.max", "60000000\n");
  in("job", "memory.current", "20000000\n");
  in("other", "memory.max", "10000000\n");
  CHECK(seen("0::/job/step\n").total == 60'000'000);
  CHECK(seen("0::/job/step\n").available == 40'000'000);
  CHECK(seen("0::/\n").total > 60'000'000);
  CHECK(seen("0::/../other\n").total > 60'000'000);
  in("job/step", "memory.max", "50000000\n");
  CHECK(seen("0::/job/step\n").total == 50'000'000);
  CHECK(seen("0::/job/step\n").available == 40'000'000);

  in("memory/slurm/job", "memory.limit_in_bytes", "30000000\n");
  in("memory/slurm/job", "memory.usage_in_bytes", "5000000\n");
  in("memory/slurm/job", "memory.stat", "cache 1\ntotal_inactive_file 1000000\n");
  in("memory/slurm", "memory.limit_in_bytes", "9223372036854771712\n");
  const auto both = seen("5:cpu,cpuacct:/slurm/job\n4:memory:/slurm/job\n0::/job/step\n");
  CHECK(both.total == 30'000'000);
  CHECK(both.available == 26'000'000);
}
