#pragma once

#include "kernels/product_library.h"

namespace tessera::kernels::onednn {

/// Products by oneDNN's matmul primitive, which has no bf16 on processors without AVX-512. Kernels
/// are made once per thread and form; making one takes 0.1 ms or more.

/// Whether there is a kernel but for reference loops, with at most 16 MiB of scratch memory.
bool has_primitive(const LibraryProduct::Form& form);
/// @return false if there is none, or it failed
bool multiply_by_primitive(const LibraryProduct& product);

}  // namespace tessera::kernels::onednn
