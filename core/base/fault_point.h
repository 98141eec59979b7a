#pragma once

/// Defined by a library that tests preload to kill, stop or slow a rank at a named point. Null
/// otherwise.
extern "C" [[gnu::weak]] void tessera_fault_point(const char* name);

namespace tessera {

/// Marks a point for fault injection: "forward", "all_gather", "save/commit".
inline void fault_point(const char* name) {
  if (tessera_fault_point != nullptr) [[unlikely]]
    tessera_fault_point(name);
}

}  // namespace tessera
