#pragma once

// Placed before a loop. TESSERA_UNROLL: makes the index a constant, so that indexed arrays stay in
// registers. TESSERA_KEEP_LOOP: saves registers where speed does not matter.
#if defined(TESSERA_FIBER)
#define TESSERA_UNROLL
#define TESSERA_KEEP_LOOP
#else
#define TESSERA_UNROLL _Pragma("unroll")
#define TESSERA_KEEP_LOOP _Pragma("unroll 1")
#endif
