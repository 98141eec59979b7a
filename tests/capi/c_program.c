#include "tests/capi/c_program.h"

#include <stdio.h>
#include <string.h>
#include <tessera/c_api.h>

#define CHECK(condition) \
  if (!(condition)) return __LINE__

static int count_calls(void* user, int64_t done, int64_t total) {
  ++*(int*)user;
  return done > total;
}

int run_c_program(const char* dir) {
  CHECK(tessera_api_version() == TESSERA_API_VERSION);
  CHECK(strlen(tessera_library_version()) > 0);

  /* A matrix of 3 x 4, saved as its left and its right half. */
  const int64_t shape[] = {3, 4}, extents[] = {3, 2};
  const int64_t left_at[] = {0, 0}, right_at[] = {0, 2};
  const float left[] = {0, 1, 4, 5, 8, 9}, right[] = {2, 3, 6, 7, 10, 11};
  tessera_part part = {NULL, "w", "F32", 2, shape, left_at, extents, left};
  const tessera_option step[] = {{"step", "7"}};
  CHECK(tessera_save(dir, step, 1, &part, 1, NULL, NULL, NULL) == TESSERA_IO);
  CHECK(strstr(tessera_error_message(), "hold 6 of the 12 elements") != NULL);
  const float whole[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  part.extents = shape;
  part.data = whole;
  CHECK(tessera_save(dir, step, 1, &part, 1, NULL, NULL, NULL) == TESSERA_OK);
  CHECK(*tessera_error_message() == '\0');
  part.extents = extents;
  part.offsets = right_at;
  part.data = right;

  tessera_source* source = NULL;
  CHECK(tessera_open(dir, NULL, 0, &source) == TESSERA_OK);
  CHECK(strcmp(tessera_source_kind(source), "tessera checkpoint") == 0);
  CHECK(strstr(tessera_source_path(source), "step-00000007") != NULL);
  CHECK(tessera_tensor_count(source) == 1);
  CHECK(strcmp(tessera_tensor_name(source, 0), "w") == 0);
  CHECK(strcmp(tessera_tensor_dtype(source, 0), "F32") == 0);
  CHECK(tessera_tensor_dims(source, 0) == 2 && tessera_tensor_width(source, 0) == 4);
  CHECK(memcmp(tessera_tensor_shape(source, 0), shape, sizeof(shape)) == 0);
  CHECK(tessera_tensor_name(source, 1) == NULL);
  float read[6];
  CHECK(tessera_read(source, 0, right_at, shape, NULL, read, sizeof(read)) == TESSERA_OK);
  CHECK(memcmp(read, right, sizeof(right)) == 0);
  CHECK(tessera_read(source, 0, NULL, NULL, NULL, read, sizeof(read)) == TESSERA_INVALID_ARGUMENT);
  CHECK(strcmp(tessera_error_tensor(), "w") == 0);
  size_t index = 1;
  CHECK(tessera_find(source, "w", &index) == TESSERA_OK && index == 0);
  CHECK(tessera_find(source, "v", &index) == TESSERA_INVALID_ARGUMENT);
  tessera_close(source);

  int calls = 0;
  CHECK(tessera_verify(dir, NULL, 0, NULL, count_calls, NULL, &calls) == TESSERA_OK && calls > 0);
  char out[4096];
  CHECK(snprintf(out, sizeof(out), "%s/out", dir) < (int)sizeof(out));
  const tessera_option format[] = {{"format", "safetensors"}};
  calls = 0;
  CHECK(tessera_consolidate(dir, out, format, 1, count_calls, NULL, NULL, &calls) == TESSERA_OK);
  CHECK(calls > 0);
  return 0;
}
