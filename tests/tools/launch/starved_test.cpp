#include "tools/tessera/launch/starved.h"

#include <doctest/doctest.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <thread>

using namespace tessera;
using namespace std::chrono_literals;

TEST_CASE("time is added for what was waited, up to a limit, and not twice") {
  CHECK(tools::time_for_starved(0ms, 0ms) == 0ms);
  CHECK(tools::time_for_starved(99ms, 0ms) == 0ms);
  CHECK(tools::time_for_starved(700ms, 0ms) == 700ms);
  CHECK(tools::time_for_starved(700ms, 650ms) == 0ms);
  CHECK(tools::time_for_starved(700ms, 2s) == 0ms);  // as it was withheld from all
  CHECK(tools::time_for_starved(1h, 0ms) == 3s);
  CHECK(tools::time_for_starved(1h, 2500ms) == 500ms);
  CHECK(tools::time_for_starved(1h, 3s) == 0ms);
}

TEST_CASE("two processes on one processor both wait for it") {
  pid_t pids[2] = {};
  cpu_set_t allowed, one;
  REQUIRE(::sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &one);
  for (pid_t& pid : pids) {
    pid = ::fork();
    if (pid != 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::sched_setaffinity(0, sizeof(one), &one);
    for (std::atomic<int> i = 0;;) ++i;
  }
  const auto waited = [&] { return std::min(tools::starved(pids[0]), tools::starved(pids[1])); };
  for (int i = 0; i < 500 && waited() < 200ms; ++i) std::this_thread::sleep_for(20ms);
  CHECK(waited() >= 200ms);
  for (const pid_t pid : pids) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    CHECK(tools::starved(pid) == 0ms);
  }
}
