#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// Instruction sets that the CPU kernels are built for. Generic is the compiler's baseline and the
/// only one on processors other than x86-64.
enum class CpuLevel : std::uint8_t { Generic, V2, V3, V4 };

/// The highest level that this processor runs and this build holds.
CpuLevel detect_cpu_level();
/// "generic", "x86-64-v2", ...
std::string_view cpu_level_name(CpuLevel level);
/// @param name  as printed by cpu_level_name, or its last part ("v3")
/// @throws InvalidArgument on another name, Unsupported if this processor cannot run it
CpuLevel parse_cpu_level(std::string_view name);

}  // namespace tessera
