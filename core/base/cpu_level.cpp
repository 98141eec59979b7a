#include "core/base/cpu_level.h"

#include <algorithm>
#include <array>

#include "core/base/error.h"

namespace tessera {

std::span<const CpuLevel> cpu_levels() {
#if defined(__x86_64__) && !defined(TESSERA_GENERIC_CPU)
  static constexpr CpuLevel kLevels[] = {CpuLevel::V3, CpuLevel::V4};
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return std::span(kLevels).first(v4 ? 2 : v3 ? 1 : 0);
#else
  static constexpr CpuLevel kLevels[] = {CpuLevel::Generic};
  return kLevels;
#endif
}

CpuLevel detect_cpu_level(std::span<const CpuLevel> levels) {
  require<Unsupported>(!levels.empty(),
                       "this processor lacks AVX2 and FMA (x86-64-v3), which the CPU kernels need; "
                       "a build with -DTESSERA_GENERIC_CPU=ON runs without them, slowly");
  return levels.back();
}

std::string_view cpu_level_name(CpuLevel level) {
  static constexpr std::array<std::string_view, 3> kNames = {"generic", "x86-64-v3", "x86-64-v4"};
  return kNames.at(static_cast<std::size_t>(level));
}

CpuLevel parse_cpu_level(std::string_view name) {
  for (const CpuLevel level : {CpuLevel::Generic, CpuLevel::V3, CpuLevel::V4}) {
    const std::string_view full = cpu_level_name(level);
    if (name != full && (level == CpuLevel::Generic || name != full.substr(7))) continue;
    const auto levels = cpu_levels();
    require<Unsupported>(std::find(levels.begin(), levels.end(), level) != levels.end(),
                         "CPU level {} is not available; the highest of this build and processor "
                         "is {}",
                         full, cpu_level_name(detect_cpu_level()));
    return level;
  }
  throw InvalidArgument("unknown CPU level '{}'; use generic, v3 or v4", name);
}

}  // namespace tessera
