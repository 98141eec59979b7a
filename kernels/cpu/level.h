#pragma once

/// Every .cpp of this folder is compiled once per CPU level (see CMakeLists.txt), with the
/// instruction set of that level and TESSERA_CPU_NAMESPACE set to its name. All code of a kernel
/// file stands between TESSERA_CPU_BEGIN and TESSERA_CPU_END, so that no function compiled for one
/// level can be linked into another; for the same reason the build renames Eigen's namespace per
/// level, and these files instantiate no templates of the standard library that could be shared (no
/// containers, no std::function; <cmath>, <algorithm>'s min and max, <bit> are fine). A test checks
/// the symbols.
#ifndef TESSERA_CPU_NAMESPACE
#error "kernels/cpu is compiled per level by kernels/CMakeLists.txt"
#endif

#define TESSERA_CPU_BEGIN namespace tessera::kernels::cpu::TESSERA_CPU_NAMESPACE {
#define TESSERA_CPU_END }
