#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

/// Instruction sets of the CPU kernels. Generic is the compiler's baseline: the only level of
/// builds with TESSERA_GENERIC_CPU and on processors other than x86-64.
enum class CpuLevel : std::uint8_t { Generic, V3, V4 };

/// Levels of this build that this processor runs, ascending.
std::span<const CpuLevel> cpu_levels();
/// The highest of `levels`.
/// @throws Unsupported if there is none: a processor without AVX2
CpuLevel detect_cpu_level(std::span<const CpuLevel> levels = cpu_levels());
/// "generic", "x86-64-v3", ...
std::string_view cpu_level_name(CpuLevel level);
/// @param name  as printed by cpu_level_name, or its last part ("v3")
/// @throws InvalidArgument on another name, Unsupported if build or processor lacks the level
CpuLevel parse_cpu_level(std::string_view name);

}  // namespace tessera
