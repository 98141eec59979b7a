#pragma once

#include <sys/types.h>

#include <chrono>

namespace tessera::tools {

/// How long the thread of a process that waited for a processor most has done so since it began.
/// Zero if the process is gone, or the system does not count it (CONFIG_SCHED_INFO).
std::chrono::nanoseconds starved(pid_t pid);

/// What is added to the time that ranks are given, on a machine with more to do than it has
/// processors for.
/// @param waited  the longest that one of them waited for a processor since they were given time
/// @param added   to that time until now, for this or another reason
/// @return zero if it is not worth it: it is less than 100 ms, or 3 s were added
std::chrono::nanoseconds time_for_starved(std::chrono::nanoseconds waited,
                                          std::chrono::nanoseconds added);

}  // namespace tessera::tools
