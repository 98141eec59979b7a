#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "core/base/plugin.h"
#include "kernels/cuda/cudnn_attention.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::CudaBackend;

/// cuDNN attention for one backend, or the reason why it is not used.
class Library final : public tessera::cuda::KernelState {
 public:
  explicit Library(CudaBackend& backend) {
    const char* off = std::getenv("TESSERA_ATTENTION");  // NOLINT(concurrency-mt-unsafe)
    if (off != nullptr && std::string_view(off) == "own") {
      why_not_ = "TESSERA_ATTENTION=own";
      return;
    }
    Dl_info self{};
    ::dladdr(reinterpret_cast<void*>(&attention_forward_by_library), &self);
    const auto path = std::filesystem::path(self.dli_fname).parent_path() / "libtessera_cudnn.so";
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) {
      why_not_ = "this build has no cuDNN";
      return;
    }
    try {
      const Plugin plugin("attention by cuDNN", {}, nullptr, path.string());
      plugin.require_version("tessera_cudnn_plugin_version", kPluginVersion);
      using Open = CudnnAttention* (*)(CudaBackend&);
      attention_.reset(plugin.symbol<Open>("tessera_open_cudnn")(backend));
    } catch (const Error& error) {
      why_not_ = error.what();
    }
  }

  template <typename Args>
  bool run(CudaBackend& backend, Context& context, const Args& args,
           std::string (CudnnAttention::*kernel)(Context&, const Args&), const char* name) {
    const std::string why = !args.variant.is_causal_only() ? kVariant
                            : attention_                   ? ((*attention_).*kernel)(context, args)
                                                           : why_not_;
    backend.note(why.empty() ? fmt::format("attention {}: {}", name, attention_->version())
                             : fmt::format("attention {}: tessera's own kernel; {}", name, why));
    return why.empty();
  }

 private:
  static constexpr const char* kVariant = "cuDNN's is used for plain causal attention alone";
  std::unique_ptr<CudnnAttention> attention_;
  std::string why_not_;
};

Library& library_of(CudaBackend& backend) {
  if (!backend.attention_state) backend.attention_state = std::make_unique<Library>(backend);
  return static_cast<Library&>(*backend.attention_state);
}

}  // namespace

bool attention_forward_by_library(Context& context, const AttentionForward& args) {
  auto& backend = static_cast<CudaBackend&>(context.backend());
  return library_of(backend).run(backend, context, args, &CudnnAttention::forward, "forward");
}

bool attention_backward_by_library(Context& context, const AttentionBackward& args) {
  auto& backend = static_cast<CudaBackend&>(context.backend());
  return library_of(backend).run(backend, context, args, &CudnnAttention::backward, "backward");
}

}  // namespace tessera::kernels::cuda
