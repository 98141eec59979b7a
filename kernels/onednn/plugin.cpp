#include <oneapi/dnnl/dnnl.hpp>
#include <string>

#include "kernels/onednn/one_call.h"
#include "kernels/onednn/primitive.h"

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

using tessera::DType;
using tessera::kernels::LibraryProduct;
namespace onednn = tessera::kernels::onednn;

namespace {

bool has(dnnl::cpu_isa needed) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  return (isa & static_cast<unsigned>(needed)) == static_cast<unsigned>(needed);
}

/// Slightly faster than the primitive in f32, and for all forms at once.
bool multiply_f32(const LibraryProduct& product) {
  const LibraryProduct::Form& f = product.form;
  const onednn::OneThread one_thread;
  const onednn::BlockedSignals blocked_signals;
  return dnnl_sgemm(f.transpose_a ? 'T' : 'N', f.transpose_b ? 'T' : 'N', f.m, f.n, f.k, 1.0F,
                    static_cast<const float*>(product.a), f.a_stride,
                    static_cast<const float*>(product.b), f.b_stride, f.accumulate ? 1.0F : 0.0F,
                    static_cast<float*>(product.c), f.c_stride) == dnnl_success;
}

}  // namespace

TESSERA_EXPORT int tessera_onednn_plugin_version() {
  return tessera::kernels::kProductPluginVersion;
}

TESSERA_EXPORT const char* tessera_onednn_name() {
  static const std::string name = [] {
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch);
  }();
  return name.c_str();
}

TESSERA_EXPORT bool tessera_onednn_has_bf16() { return has(dnnl::cpu_isa::avx512_core_bf16); }

TESSERA_EXPORT bool tessera_onednn_has_amx() { return has(dnnl::cpu_isa::avx512_core_amx); }

TESSERA_EXPORT bool tessera_onednn_supports(const LibraryProduct::Form& form) {
  return form.operands == DType::F32 ? !form.has_bias : onednn::has_primitive(form);
}

TESSERA_EXPORT bool tessera_onednn_multiply(const LibraryProduct& product) {
  return product.form.operands == DType::F32 ? multiply_f32(product)
                                             : onednn::multiply_by_primitive(product);
}
