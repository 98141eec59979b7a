#include "tools/tessera/launch/starved.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace tessera::tools {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kLeast{100}, kMost{3000};

}  // namespace

nanoseconds starved(pid_t pid) {
  nanoseconds most{};
  std::error_code error;  // it, or a thread of it, may end meanwhile
  std::filesystem::directory_iterator thread(fmt::format("/proc/{}/task", pid), error);
  for (const std::filesystem::directory_iterator end; !error && thread != end;
       thread.increment(error)) {
    std::ifstream in(thread->path() / "schedstat");
    std::int64_t ran = 0, waited = 0;
    if (in >> ran >> waited) most = std::max(most, nanoseconds(waited));
  }
  return most;
}

nanoseconds time_for_starved(nanoseconds waited, nanoseconds added) {
  const nanoseconds more = std::min<nanoseconds>(waited, kMost) - added;
  return more < kLeast ? nanoseconds::zero() : more;
}

}  // namespace tessera::tools
