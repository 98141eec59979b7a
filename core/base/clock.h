#pragma once

#include <chrono>
#include <string>

namespace tessera {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// "850 ms", "12.3 s", "4m 05s", "2h 07m", "3d 04h"
std::string format_duration(double seconds);
inline std::string format_duration(std::chrono::duration<double> time) {
  return format_duration(time.count());
}

}  // namespace tessera
