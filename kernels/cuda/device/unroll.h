#pragma once

// Before a loop. TESSERA_UNROLL: its index is a constant in every round, so that arrays it indexes
// can lie in registers. TESSERA_KEEP_LOOP: where speed does not matter, but registers do.
#if defined(TESSERA_FIBER)
#define TESSERA_UNROLL
#define TESSERA_KEEP_LOOP
#else
#define TESSERA_UNROLL _Pragma("unroll")
#define TESSERA_KEEP_LOOP _Pragma("unroll 1")
#endif
