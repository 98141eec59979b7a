/* Lists the tensors of a checkpoint of any kind that tessera reads, or prints the first row of one.

     cc read.c -I PREFIX/include -L PREFIX/lib -ltessera -Wl,-rpath,PREFIX/lib -o read
     ./read CHECKPOINT [TENSOR] */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/c_api.h>

static void list(const tessera_source* source) {
  for (size_t i = 0; i < tessera_tensor_count(source); ++i) {
    printf("%s %s [", tessera_tensor_name(source, i), tessera_tensor_dtype(source, i));
    for (size_t d = 0; d < tessera_tensor_dims(source, i); ++d)
      printf("%s%" PRId64, d == 0 ? "" : ", ", tessera_tensor_shape(source, i)[d]);
    printf("]\n");
  }
}

static int print_row(const tessera_source* source, const char* name) {
  size_t tensor = 0;
  int status = tessera_find(source, name, &tensor);
  if (status != TESSERA_OK) return status;
  const size_t dims = tessera_tensor_dims(source, tensor);
  int64_t begin[8] = {0}, end[8]; /* tensors have at most 8 dims */
  size_t elements = 1;
  for (size_t d = 0; d < dims; ++d) {
    end[d] = d + 1 < dims ? 1 : tessera_tensor_shape(source, tensor)[d];
    elements *= (size_t)end[d];
  }
  float* row = malloc(elements * sizeof(float));
  status = tessera_read(source, tensor, begin, end, "F32", row, elements * sizeof(float));
  for (size_t i = 0; status == TESSERA_OK && i < elements; ++i) printf("%g\n", row[i]);
  free(row);
  return status;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: read CHECKPOINT [TENSOR]\n");
    return 2;
  }
  tessera_source* source = NULL;
  int status = tessera_open(argv[1], NULL, 0, &source);
  if (status == TESSERA_OK && argc < 3) list(source);
  if (status == TESSERA_OK && argc >= 3) status = print_row(source, argv[2]);
  if (status != TESSERA_OK) fprintf(stderr, "read: %s\n", tessera_error_message());
  tessera_close(source);
  return status == TESSERA_OK ? 0 : 1;
}
