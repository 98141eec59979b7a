#pragma once

#include <cstdint>
#include <string>

#include "core/base/dtype.h"

namespace tessera::kernels {

/// C = op(A) op(B) [+ bias] [+ C] for row-major matrices, on the calling thread. In f32 without bias.
struct LibraryProduct {
  /// Key of a library's kernel.
  struct Form {
    DType operands;  ///< f32, bf16; of A, B and bias
    DType result;    ///< f32, or the dtype of the operands
    bool transpose_a, transpose_b, has_bias, accumulate;
    std::int64_t m, n, k;                       ///< as in BLAS, above 0
    std::int64_t a_stride, b_stride, c_stride;  ///< elements from row to row, in memory
    bool operator==(const Form&) const = default;
  };
  Form form;
  const void *a, *b, *bias;  ///< bias  [N], null if !has_bias
  void* c;
};

inline constexpr int kProductPluginVersion = 4;

/// Library of matrix products on the CPU: oneDNN, if its plugin can be loaded, else Eigen.
struct ProductLibrary {
  std::string name;     ///< "oneDNN 2.6.3" or "Eigen"
  std::string problem;  ///< why the plugin was found, but not loaded
  /// Whether the processor multiplies bf16 (AVX512-BF16, AMX) and the library uses that.
  bool has_bf16 = false;
  /// Whether it uses AMX for that.
  bool has_amx = false;
  /// Whether the library has a fast kernel for products of this form, which takes at most 16 MiB of
  /// scratch memory per thread.
  bool (*supports)(const LibraryProduct::Form&) = nullptr;
  /// @return false if the library failed: the result is undefined
  bool (*multiply)(const LibraryProduct&) = nullptr;
};

/// Chosen once per process. TESSERA_ONEDNN_PLUGIN: path of the plugin, or "off".
const ProductLibrary& product_library();

/// A product of a form that the library supports. @throws InternalError if the library fails
void multiply_by_library(const LibraryProduct& product);

}  // namespace tessera::kernels
