#include "kernels/onednn/primitive.h"

#include <bit>
#include <cstddef>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/onednn/one_call.h"

namespace tessera::kernels::onednn {
namespace {

using Form = LibraryProduct::Form;

constexpr std::size_t kMaxScratchBytes = 16 << 20;
constexpr std::size_t kMaxForms = 256;  // kept per thread

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::memory::data_type type_of(DType dtype) {
  return dtype == DType::BF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                          bool transposed) {
  using Dims = dnnl::memory::dims;
  return {{rows, columns}, type_of(dtype), transposed ? Dims{1, stride} : Dims{stride, 1}};
}

/// oneDNN's kernel for products of one form.
struct Kernel {
  dnnl::memory::desc a, b, bias, c, scratch;
  dnnl::matmul run;
};

/// @return nothing if oneDNN has only its reference loops, or takes too much memory
std::optional<Kernel> make_kernel(const Form& f) {
  const OneThread one_thread;
  const BlockedSignals blocked_signals;
  try {
    Kernel kernel;
    kernel.a = layout(f.operands, f.m, f.k, f.a_stride, f.transpose_a);
    kernel.b = layout(f.operands, f.k, f.n, f.b_stride, f.transpose_b);
    kernel.c = layout(f.result, f.m, f.n, f.c_stride, false);
    if (f.has_bias) kernel.bias = layout(f.operands, 1, f.n, f.n, false);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (f.accumulate) {
      dnnl::post_ops addition;
      addition.append_sum(1.0F);
      attributes.set_post_ops(addition);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc description(engine(), kernel.a, kernel.b, kernel.bias,
                                                   kernel.c, attributes);
#else
    const dnnl::matmul::primitive_desc description({kernel.a, kernel.b, kernel.bias, kernel.c},
                                                   attributes, engine());
#endif
    if (std::string_view(description.impl_info_str()).starts_with("ref")) return std::nullopt;
    kernel.scratch = description.scratchpad_desc();
    if (kernel.scratch.get_size() > kMaxScratchBytes) return std::nullopt;
    kernel.run = dnnl::matmul(description);
    return kernel;
  } catch (const dnnl::error&) {
    return std::nullopt;
  }
}

struct FormHash {
  std::size_t operator()(const Form& f) const {
    std::size_t hash = 0;
    const auto mix = [&](auto value) {
      hash = (std::rotl(hash, 5) ^ static_cast<std::size_t>(value)) * 0x9e3779b97f4a7c15U;
    };
    mix(f.operands), mix(f.result), mix(f.transpose_a), mix(f.transpose_b), mix(f.has_bias);
    mix(f.accumulate), mix(f.m), mix(f.n), mix(f.k), mix(f.a_stride), mix(f.b_stride);
    mix(f.c_stride);
    return hash;
  }
};

const std::optional<Kernel>& kernel_for(const Form& form) {
  thread_local std::unordered_map<Form, std::optional<Kernel>, FormHash> kernels;
  if (kernels.size() >= kMaxForms) kernels.clear();
  const auto [at, is_new] = kernels.try_emplace(form);
  if (is_new) at->second = make_kernel(form);
  return at->second;
}

}  // namespace

bool has_primitive(const Form& form) { return kernel_for(form).has_value(); }

bool multiply_by_primitive(const LibraryProduct& product) {
  const std::optional<Kernel>& kernel = kernel_for(product.form);
  if (!kernel) return false;
  const OneThread one_thread;
  const BlockedSignals blocked_signals;
  thread_local std::vector<std::byte> scratch;
  if (scratch.size() < kernel->scratch.get_size()) scratch.resize(kernel->scratch.get_size());
  const auto memory = [](const dnnl::memory::desc& desc, const void* data) {
    return dnnl::memory(desc, engine(), const_cast<void*>(data));  // NOLINT(*-const-cast)
  };
  try {
    thread_local dnnl::stream stream(engine());
    std::unordered_map<int, dnnl::memory> arguments = {
        {DNNL_ARG_SRC, memory(kernel->a, product.a)},
        {DNNL_ARG_WEIGHTS, memory(kernel->b, product.b)},
        {DNNL_ARG_DST, memory(kernel->c, product.c)},
        {DNNL_ARG_SCRATCHPAD, memory(kernel->scratch, scratch.data())}};
    if (product.form.has_bias) arguments[DNNL_ARG_BIAS] = memory(kernel->bias, product.bias);
    kernel->run.execute(stream, arguments);
    stream.wait();
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

}  // namespace tessera::kernels::onednn
