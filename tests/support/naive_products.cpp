// A library of matrix products (kernels/product_library.h) that computes everything in loops, bf16 included: what
// passes products to a library can be tested on processors without instructions for bf16.
#include "core/base/dtype.h"
#include "kernels/product_library.h"

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tessera::BFloat16;
using tessera::DType;
using tessera::kernels::LibraryProduct;

float load(const void* data, std::int64_t i, DType dtype) {
  return dtype == DType::BF16 ? static_cast<float>(static_cast<const BFloat16*>(data)[i])
                              : static_cast<const float*>(data)[i];
}

void store(void* data, std::int64_t i, DType dtype, float value) {
  if (dtype == DType::BF16)
    static_cast<BFloat16*>(data)[i] = BFloat16(value);
  else
    static_cast<float*>(data)[i] = value;
}

}  // namespace

TESSERA_EXPORT int tessera_onednn_plugin_version() {
  return tessera::kernels::kProductPluginVersion;
}

TESSERA_EXPORT const char* tessera_onednn_name() { return "naive products"; }

TESSERA_EXPORT bool tessera_onednn_has_bf16() { return true; }
TESSERA_EXPORT bool tessera_onednn_has_amx() { return true; }

/// As if every element of the result took 1 KiB of scratch memory.
TESSERA_EXPORT bool tessera_onednn_supports(const LibraryProduct::Form& form) {
  return form.m * form.n <= 16 << 10;
}

TESSERA_EXPORT bool tessera_onednn_multiply(const LibraryProduct& product) {
  const LibraryProduct::Form& f = product.form;
  for (std::int64_t i = 0; i < f.m; ++i)
    for (std::int64_t j = 0; j < f.n; ++j) {
      float sum = f.has_bias ? load(product.bias, j, f.operands) : 0.0F;
      for (std::int64_t p = 0; p < f.k; ++p)
        sum +=
            load(product.a, f.transpose_a ? p * f.a_stride + i : i * f.a_stride + p, f.operands) *
            load(product.b, f.transpose_b ? j * f.b_stride + p : p * f.b_stride + j, f.operands);
      const std::int64_t at = i * f.c_stride + j;
      store(product.c, at, f.result, f.accumulate ? sum + load(product.c, at, f.result) : sum);
    }
  return true;
}
