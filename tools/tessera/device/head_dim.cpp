#include "tools/tessera/device/head_dim.h"

#include "core/base/error.h"
#include "kernels/attention.h"

namespace tessera::tools {

void require_head_dim(const models::Gpt2Config& model, Device device, std::string_view cpu_flag) {
  const std::int64_t head_dim = model.n_embd / model.n_head;
  require<Unsupported>(device.type != DeviceType::CUDA || head_dim <= kernels::kMostCudaHeadDim,
                       "model.n_embd {} over model.n_head {} is a head_dim of {}, and the GPU "
                       "kernels support at most {}; raise "
                       "model.n_head, or compute on the CPU ({})",
                       model.n_embd, model.n_head, head_dim, kernels::kMostCudaHeadDim, cpu_flag);
}

}  // namespace tessera::tools
