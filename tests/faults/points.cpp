// For LD_PRELOAD: implements the fault points of core/base/fault_point.h, and fails one rank at its
// n-th pass of a point:
//
//     TESSERA_FAULT=<kind>:<point>:<n>:<rank>
//
// kill, stop and abort raise SIGKILL, SIGSTOP and SIGABRT; exit exits with code 7; memory throws
// std::bad_alloc; hang sleeps for ten minutes while other threads keep running; slow sleeps 100 ms
// at every pass from the n-th on; late sleeps 1.5 s once. Just before the first fault,
// writes the time to the file TESSERA_FAULT_MARK, if set.

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <string>

#include "tests/support/machine_time.h"

namespace {

struct Fault {
  std::string kind, point;
  long pass = 0;
  bool armed = false;

  Fault() {
    const char* const text = std::getenv("TESSERA_FAULT");
    const char* const rank = std::getenv("RANK");
    if (text == nullptr || rank == nullptr) return;
    std::string fields[4], rest = text;
    for (int i = 0; i < 3; ++i) {
      const auto colon = rest.find(':');
      if (colon == std::string::npos) return;
      fields[i] = rest.substr(0, colon);
      rest.erase(0, colon + 1);
    }
    fields[3] = rest;
    if (fields[3] != rank) return;
    kind = fields[0];
    point = fields[1];
    pass = std::strtol(fields[2].c_str(), nullptr, 10);
    armed = true;
  }
};

void sleep_ms(long ms) {
  const timespec time{ms / 1000, ms % 1000 * 1'000'000};
  ::nanosleep(&time, nullptr);
}

void mark() {
  if (const char* const file = std::getenv("TESSERA_FAULT_MARK"))
    tessera::test::Stopwatch().save(file);
}

}  // namespace

extern "C" void tessera_fault_point(const char* name);

extern "C" __attribute__((visibility("default"))) void tessera_fault_point(const char* name) {
  static std::mutex mutex;
  static Fault fault;
  static long passes = 0;
  std::unique_lock lock(mutex);
  if (!fault.armed || fault.point != name) return;
  const long pass = ++passes;
  if (fault.kind == "slow") {
    if (pass == fault.pass) mark();
    lock.unlock();
    if (pass >= fault.pass) sleep_ms(100);
    return;
  }
  if (pass != fault.pass) return;
  mark();
  lock.unlock();
  if (fault.kind == "kill") ::raise(SIGKILL);
  if (fault.kind == "stop") ::raise(SIGSTOP);
  if (fault.kind == "abort") std::abort();
  if (fault.kind == "exit") ::_exit(7);
  if (fault.kind == "late") sleep_ms(1500);
  if (fault.kind == "hang") sleep_ms(600'000);
  if (fault.kind == "memory") throw std::bad_alloc();
}
