// The compiler's calls for the thread sanitizer (-fsanitize=thread), whose run-time library is not linked:
// they report the kernels' accesses to memory to the fibers.
#include <cstddef>

#include "tests/support/fiber/fiber.h"

using tessera::fiber::note_global;

#define TESSERA_ACCESS(bytes)                                                  \
  void __tsan_read##bytes(void* p) { note_global(p, bytes, false); }           \
  void __tsan_write##bytes(void* p) { note_global(p, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* p) { note_global(p, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* p) { note_global(p, bytes, true); }

// NOLINTBEGIN(bugprone-reserved-identifier): the compiler's names
extern "C" {
TESSERA_ACCESS(1)
TESSERA_ACCESS(2)
TESSERA_ACCESS(4)
TESSERA_ACCESS(8)
TESSERA_ACCESS(16)
void __tsan_read_range(void* p, std::size_t bytes) { note_global(p, bytes, false); }
void __tsan_write_range(void* p, std::size_t bytes) { note_global(p, bytes, true); }

// Host code in the same files calls these; they do nothing.
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
// NOLINTEND(bugprone-reserved-identifier)
