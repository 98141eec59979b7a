#pragma once

#include <cstdint>
#include <string>

namespace tessera::kernels {

/// C = op(A) op(B) + beta C for row-major float32 matrices, on the calling thread. m, n, k as in
/// BLAS; op: 'N' as it is, 'T' transposed. @return whether it was computed
using Sgemm = bool (*)(char op_a, char op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                       const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride,
                       float beta, float* c, std::int64_t c_stride);

inline constexpr int kProductPluginVersion = 1;

/// Library of float32 matrix products on the CPU: oneDNN, if its plugin can be loaded, else Eigen.
struct ProductLibrary {
  std::string name;       ///< "oneDNN 2.6.3" or "Eigen"
  Sgemm sgemm = nullptr;  ///< null: Eigen
  std::string problem;    ///< why the plugin was found, but not loaded
};

/// Chosen once per process. TESSERA_ONEDNN_PLUGIN: path of the plugin, or "off".
const ProductLibrary& product_library();

}  // namespace tessera::kernels
