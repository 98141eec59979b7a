// Attention as cuDNN graphs.
#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "kernels/cuda/cudnn/attention_plan.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/scratch.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::CudaBackend;

class Attention final : public CudnnAttention {
 public:
  explicit Attention(CudaBackend& backend) {
    check(cudnnCreate(&handle_), "cudnnCreate");
    check(cudnnSetStream(handle_, static_cast<cudaStream_t>(backend.stream())), "cudnnSetStream");
  }
  ~Attention() override { cudnnDestroy(handle_); }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  std::string version() const override { return cudnn_version(); }

  std::string forward(Context& context, const AttentionForward& args) override {
    if (std::string why = why_not(args.q, args.k, {&args.q, &args.k, &args.v, &args.out});
        !why.empty())
      return why;
    std::unordered_map<std::int64_t, void*> data = {
        {kQ, args.q.data}, {kK, args.k.data}, {kV, args.v.data}, {kOut, args.out.data}};
    if (args.log_sum_exp.defined()) data[kStats] = args.log_sum_exp.data;
    return run(context, key_of(args), data);
  }

  std::string backward(Context& context, const AttentionBackward& args) override {
    const TensorView &dq = args.grad_q.view, &dk = args.grad_k.view, &dv = args.grad_v.view;
    for (const GradientView* grad : {&args.grad_q, &args.grad_k, &args.grad_v})
      if (!grad->wanted || grad->accumulate)
        return "cuDNN writes all three gradients and can't accumulate";
    if (std::string why = why_not(
            args.q, args.k, {&args.q, &args.k, &args.v, &args.out, &args.grad_out, &dq, &dk, &dv});
        !why.empty())
      return why;
    return run(context, key_of(args, context.deterministic()),
               {{kQ, args.q.data},
                {kK, args.k.data},
                {kV, args.v.data},
                {kOut, args.out.data},
                {kStats, args.log_sum_exp.data},
                {kGradOut, args.grad_out.data},
                {kGradQ, dq.data},
                {kGradK, dk.data},
                {kGradV, dv.data}});
  }

 private:
  static void check(cudnnStatus_t status, const char* what) {
    require<CudaError>(status == CUDNN_STATUS_SUCCESS, "{}: {}", what, cudnnGetErrorString(status));
  }

  static std::string why_not(const TensorView& q, const TensorView& k,
                             std::initializer_list<const TensorView*> views) {
    if (q.dtype != DType::BF16) return fmt::format("the dtype is {}", q.dtype);
    if (q.shape[1] != k.shape[1]) return "the numbers of queries and keys differ";
    if (q.shape[3] % 8 != 0) return fmt::format("head_dim {} is no multiple of 8", q.shape[3]);
    if (q.numel() == 0) return "there is nothing to do";
    for (const TensorView* view : views) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(view->data) % 16 == 0 &&
                           view->strides[0] % 8 == 0 && view->strides[1] % 8 == 0 &&
                           view->strides[2] % 8 == 0;
      if (!aligned) return "a head does not begin at a multiple of 16 bytes";
    }
    return {};
  }

  using Data = std::unordered_map<std::int64_t, void*>;

  /// Runs the batch in slices whose workspaces fit.
  std::string run(Context& context, const AttentionKey& key, const Data& data) {
    const auto plan_of = [&](std::int64_t sequences) -> const AttentionPlan& {
      const AttentionKey part = key.with_batch(sequences);
      auto found = plans_.find(part);
      if (found == plans_.end()) found = plans_.emplace(part, make_plan(part, handle_)).first;
      return found->second;
    };
    const std::int64_t batch = key.batch();
    std::int64_t& slice = slices_.try_emplace(key, batch).first->second;
    std::optional<Workspace> workspace;
    if (std::string why_not = take_sliced_workspace(context, "cuDNN attention", batch, plan_of,
                                                    attention_workspace_fits, slice, workspace);
        !why_not.empty())
      return why_not;
    for (std::int64_t begin = 0; begin < batch; begin += slice) {
      Data part;
      for (const auto& [uid, pointer] : data)
        part[uid] = static_cast<std::byte*>(pointer) + begin * sequence_bytes(key, uid);
      const AttentionPlan& plan = plan_of(std::min(slice, batch - begin));
      fe::error_t status = plan.graph->execute(handle_, part, workspace->data());
      require<CudaError>(status.is_good(), "cuDNN attention: {}", status.get_message());
    }
    return {};
  }

  /// Bytes between the sequences of a batch.
  static std::int64_t sequence_bytes(const AttentionKey& key, std::int64_t uid) {
    if (uid == kStats)
      return statistics_window(key.windows[0]).strides[0] *
             static_cast<std::int64_t>(sizeof(float));
    return key.windows[static_cast<std::size_t>(uid - kQ)].strides[0] *
           static_cast<std::int64_t>(dtype_size(DType::BF16));
  }

  cudnnHandle_t handle_ = nullptr;
  std::map<AttentionKey, AttentionPlan> plans_;
  std::map<AttentionKey, std::int64_t> slices_;  // sequences per call, of a batch's key
};

}  // namespace
}  // namespace tessera::kernels::cuda

extern "C" {
__attribute__((visibility("default"))) int tessera_cudnn_plugin_version() {
  return tessera::kPluginVersion;
}
__attribute__((visibility("default"))) tessera::kernels::cuda::CudnnAttention* tessera_open_cudnn(
    tessera::cuda::CudaBackend& backend) {
  return new tessera::kernels::cuda::Attention(backend);
}
}
