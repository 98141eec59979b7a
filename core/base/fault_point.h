#pragma once

/// Tests load a library before the program that defines this, and kills, stops or slows a rank
/// where they want it. Nothing else does, so that a point costs a look at a null pointer.
extern "C" [[gnu::weak]] void tessera_fault_point(const char* name);

namespace tessera {

/// A place where a rank may be struck: "forward", "all_gather", "save/commit".
inline void fault_point(const char* name) {
  if (tessera_fault_point != nullptr) [[unlikely]]
    tessera_fault_point(name);
}

}  // namespace tessera
