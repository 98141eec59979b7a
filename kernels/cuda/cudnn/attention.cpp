// Attention as cuDNN graphs.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "core/base/context.h"
#include "core/base/cuda/backend.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/library_plan.h"
#include "kernels/scratch.h"

namespace tessera::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;
using tessera::cuda::CudaBackend;

// Key::windows has their windows in this order, but for kStats.
enum Uid : std::int64_t { kQ = 1, kK, kV, kOut, kGradOut, kGradQ, kGradK, kGradV, kStats };

/// Sizes and strides of a view in cuDNN's order, [B, H, T, D].
struct Window {
  std::array<std::int64_t, 4> sizes{}, strides{};
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const Window&) const = default;
};

Window window_of(const TensorView& heads) {
  const auto swap = [](const auto& values) {
    return std::array<std::int64_t, 4>{values[0], values[2], values[1], values[3]};
  };
  return {swap(heads.shape), swap(heads.strides)};
}

/// Properties that select a plan; in forward the last four windows are empty.
struct Key {
  bool backward = false;
  bool deterministic = true;
  bool statistics = false;
  float scale = 0;
  std::array<Window, 8> windows{};
  // NOLINTNEXTLINE(modernize-use-nullptr): as above
  auto operator<=>(const Key&) const = default;
};

struct Plan : LibraryPlan {
  std::unique_ptr<fe::graph::Graph> graph;  // null if why_not is set
};

std::vector<std::int64_t> list(const std::array<std::int64_t, 4>& values) {
  return {values.begin(), values.end()};
}

std::shared_ptr<fe::graph::Tensor_attributes> input(fe::graph::Graph& graph, Uid uid,
                                                    const Window& window) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_uid(uid)
                          .set_dim(list(window.sizes))
                          .set_stride(list(window.strides)));
}

void output(const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, Uid uid,
            const Window& window) {
  tensor->set_output(true)
      .set_uid(uid)
      .set_dim(list(window.sizes))
      .set_stride(list(window.strides));
}

/// log_sum_exp [B, H, T] as cuDNN's [B, H, T, 1].
Window statistics_window(const Window& q) {
  const auto [b, h, t, d] = q.sizes;
  return {{b, h, t, 1}, {h * t, t, 1, 1}};
}

class Attention final : public CudnnAttention {
 public:
  explicit Attention(CudaBackend& backend) {
    check(cudnnCreate(&handle_), "cudnnCreate");
    check(cudnnSetStream(handle_, static_cast<cudaStream_t>(backend.stream())), "cudnnSetStream");
  }
  ~Attention() override { cudnnDestroy(handle_); }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  std::string version() const override {
    const std::size_t v = cudnnGetVersion();
    return fmt::format("cuDNN {}.{}.{}", v / 10000, v / 100 % 100, v % 100);
  }

  std::string forward(Context& context, const AttentionForward& args) override {
    if (std::string why = why_not(args.q, args.k, {&args.q, &args.k, &args.v, &args.out});
        !why.empty())
      return why;
    Key key{.statistics = args.log_sum_exp.defined(), .scale = args.scale};
    key.windows = {window_of(args.q), window_of(args.k), window_of(args.v), window_of(args.out)};
    std::unordered_map<std::int64_t, void*> data = {
        {kQ, args.q.data}, {kK, args.k.data}, {kV, args.v.data}, {kOut, args.out.data}};
    if (key.statistics) data[kStats] = args.log_sum_exp.data;
    return run(context, key, data);
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
    Key key{.backward = true,
            .deterministic = context.deterministic(),
            .statistics = true,
            .scale = args.scale};
    key.windows = {
        window_of(args.q),        window_of(args.k), window_of(args.v), window_of(args.out),
        window_of(args.grad_out), window_of(dq),     window_of(dk),     window_of(dv)};
    return run(context, key,
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
  std::string run(Context& context, const Key& key, const Data& data) {
    const std::int64_t batch = key.windows[0].sizes[0];
    const auto plan_of = [&](std::int64_t sequences) -> const Plan& {
      Key part = key;
      for (Window& window : part.windows) window.sizes[0] = sequences;
      auto found = plans_.find(part);
      if (found == plans_.end()) found = plans_.emplace(part, make_plan(part)).first;
      return found->second;
    };
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
      const Plan& plan = plan_of(std::min(slice, batch - begin));
      fe::error_t status = plan.graph->execute(handle_, part, workspace->data());
      require<CudaError>(status.is_good(), "cuDNN attention: {}", status.get_message());
    }
    return {};
  }

  /// Bytes between the sequences of a batch.
  static std::int64_t sequence_bytes(const Key& key, std::int64_t uid) {
    if (uid == kStats)
      return statistics_window(key.windows[0]).strides[0] *
             static_cast<std::int64_t>(sizeof(float));
    return key.windows[static_cast<std::size_t>(uid - kQ)].strides[0] *
           static_cast<std::int64_t>(dtype_size(DType::BF16));
  }

  Plan make_plan(const Key& key) {
    Plan plan;
    auto graph = std::make_unique<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const auto q = input(*graph, kQ, key.windows[0]);
    const auto k = input(*graph, kK, key.windows[1]);
    const auto v = input(*graph, kV, key.windows[2]);
    const Window statistics = statistics_window(key.windows[0]);
    try {
      if (key.backward) {
        const auto stats = input(*graph, kStats, statistics);
        stats->set_data_type(fe::DataType_t::FLOAT);
        const auto gradients =
            graph->sdpa_backward(q, k, v, input(*graph, kOut, key.windows[3]),
                                 input(*graph, kGradOut, key.windows[4]), stats,
                                 fe::graph::SDPA_backward_attributes()
                                     .set_name("attention_backward")
                                     .set_causal_mask(true)
                                     .set_attn_scale(key.scale)
                                     .set_deterministic_algorithm(key.deterministic));
        output(gradients[0], kGradQ, key.windows[5]);
        output(gradients[1], kGradK, key.windows[6]);
        output(gradients[2], kGradV, key.windows[7]);
      } else {
        const auto [out, stats] = graph->sdpa(q, k, v,
                                              fe::graph::SDPA_attributes()
                                                  .set_name("attention_forward")
                                                  .set_generate_stats(key.statistics)
                                                  .set_causal_mask(true)
                                                  .set_attn_scale(key.scale));
        output(out, kOut, key.windows[3]);
        if (key.statistics) {
          output(stats, kStats, statistics);
          stats->set_data_type(fe::DataType_t::FLOAT);
        }
      }
      fe::error_t status = graph->validate();
      if (status.is_good()) status = graph->build_operation_graph(handle_);
      if (status.is_good()) status = graph->create_execution_plans({fe::HeurMode_t::A});
      if (status.is_good()) status = graph->check_support(handle_);
      if (status.is_good()) status = graph->build_plans(handle_);
      if (status.is_good()) status = graph->get_workspace_size(plan.workspace_bytes);
      if (status.is_good())
        plan.graph = std::move(graph);
      else
        plan.why_not = fmt::format("{} does not support it: {}", version(), status.get_message());
    } catch (const std::exception& error) {
      plan.why_not = fmt::format("{} does not support it: {}", version(), error.what());
    }
    return plan;
  }

  cudnnHandle_t handle_ = nullptr;
  std::map<Key, Plan> plans_;
  std::map<Key, std::int64_t> slices_;  // sequences per call, of a batch's key
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
