#ifndef TESSERA_TESTS_CAPI_C_PROGRAM_H
#define TESSERA_TESTS_CAPI_C_PROGRAM_H

#ifdef __cplusplus
extern "C" {
#endif

/// Saves, opens, reads, verifies and consolidates a checkpoint in an empty directory.
/// @return the line of the first failed check; 0 if there is none
int run_c_program(const char* dir);

#ifdef __cplusplus
}
#endif

#endif
