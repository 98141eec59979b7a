#include "core/base/cpu_level.h"

#include "core/base/error.h"

namespace tessera {

CpuLevel detect_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
  const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return CpuLevel::V4;
  if (v3) return CpuLevel::V3;
  if (v2) return CpuLevel::V2;
#endif
  return CpuLevel::Generic;
}

std::string_view cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::Generic:
      return "generic";
    case CpuLevel::V2:
      return "x86-64-v2";
    case CpuLevel::V3:
      return "x86-64-v3";
    case CpuLevel::V4:
      return "x86-64-v4";
  }
  return "unknown";
}

CpuLevel parse_cpu_level(std::string_view name) {
  for (const CpuLevel level : {CpuLevel::Generic, CpuLevel::V2, CpuLevel::V3, CpuLevel::V4}) {
    const std::string_view full = cpu_level_name(level);
    if (name != full && (level == CpuLevel::Generic || name != full.substr(7))) continue;
    require<Unsupported>(level <= detect_cpu_level(),
                         "CPU level {} asked for, but this processor runs {}", full,
                         cpu_level_name(detect_cpu_level()));
    return level;
  }
  throw InvalidArgument("unknown CPU level '{}'; use generic, v2, v3 or v4", name);
}

}  // namespace tessera
