#pragma once

/// Every .cpp of this folder is compiled once per CPU level (see CMakeLists.txt), with the level's
/// instruction set and TESSERA_CPU_NAMESPACE set to its name. The linker must not merge functions
/// of two levels: all code lies between TESSERA_CPU_BEGIN and TESSERA_CPU_END, the build renames
/// Eigen's namespace per level, and no shared templates of the standard library are instantiated
/// (no containers, no std::function; <cmath>, <bit>, min and max are fine). A test checks the
/// symbols.
#ifndef TESSERA_CPU_NAMESPACE
#error "kernels/cpu is compiled per level by kernels/CMakeLists.txt"
#endif

#define TESSERA_CPU_BEGIN namespace tessera::kernels::cpu::TESSERA_CPU_NAMESPACE {
#define TESSERA_CPU_END }
