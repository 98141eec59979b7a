#pragma once

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/library_plan.h"

// Attention as cuDNN graphs, and their plans, which can be made without a GPU.
namespace tessera::kernels::cuda {

namespace fe = cudnn_frontend;

/// Tensors of a graph. AttentionKey::windows has the windows of all but kStats, in this order.
enum AttentionUid : std::int64_t { kQ = 1, kK, kV, kOut, kGradOut, kGradQ, kGradK, kGradV, kStats };

/// Sizes and strides of a view in cuDNN's order, [B, H, T, D].
struct Window {
  std::array<std::int64_t, 4> sizes{}, strides{};
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const Window&) const = default;
};

inline Window window_of(const TensorView& heads) {
  const auto swap = [](const auto& values) {
    return std::array<std::int64_t, 4>{values[0], values[2], values[1], values[3]};
  };
  return {swap(heads.shape), swap(heads.strides)};
}

/// log_sum_exp [B, H, T] as cuDNN's [B, H, T, 1].
inline Window statistics_window(const Window& q) {
  const auto [b, h, t, d] = q.sizes;
  return {{b, h, t, 1}, {h * t, t, 1, 1}};
}

/// Properties that select a plan; in forward the last four windows are empty.
struct AttentionKey {
  bool backward = false;
  bool deterministic = true;
  bool statistics = false;
  float scale = 0;
  std::array<Window, 8> windows{};
  // NOLINTNEXTLINE(modernize-use-nullptr): as above
  auto operator<=>(const AttentionKey&) const = default;

  std::int64_t batch() const { return windows[0].sizes[0]; }
  AttentionKey with_batch(std::int64_t sequences) const {
    AttentionKey part = *this;
    for (Window& window : part.windows) window.sizes[0] = sequences;
    return part;
  }
};

inline AttentionKey key_of(const AttentionForward& args) {
  return {
      .statistics = args.log_sum_exp.defined(),
      .scale = args.scale,
      .windows = {window_of(args.q), window_of(args.k), window_of(args.v), window_of(args.out)}};
}

inline AttentionKey key_of(const AttentionBackward& args, bool deterministic) {
  return {.backward = true,
          .deterministic = deterministic,
          .statistics = true,
          .scale = args.scale,
          .windows = {window_of(args.q), window_of(args.k), window_of(args.v), window_of(args.out),
                      window_of(args.grad_out), window_of(args.grad_q.view),
                      window_of(args.grad_k.view), window_of(args.grad_v.view)}};
}

struct AttentionPlan : LibraryPlan {
  std::unique_ptr<fe::graph::Graph> graph;  // null if why_not is set
};

inline std::string cudnn_version() {
  const std::size_t v = cudnnGetVersion();
  return fmt::format("cuDNN {}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

/// @param handle  of a GPU; or null, with the GPU's properties in `graph`
/// @param graph   without operations
inline AttentionPlan make_plan(
    const AttentionKey& key, cudnnHandle_t handle,
    std::unique_ptr<fe::graph::Graph> graph = std::make_unique<fe::graph::Graph>()) {
  const auto list = [](const std::array<std::int64_t, 4>& values) {
    return std::vector<std::int64_t>(values.begin(), values.end());
  };
  const auto input = [&](AttentionUid uid, const Window& window) {
    return graph->tensor(fe::graph::Tensor_attributes()
                             .set_uid(uid)
                             .set_dim(list(window.sizes))
                             .set_stride(list(window.strides)));
  };
  const auto output = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& tensor,
                          AttentionUid uid, const Window& window) {
    tensor->set_output(true)
        .set_uid(uid)
        .set_dim(list(window.sizes))
        .set_stride(list(window.strides));
  };
  graph->set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto q = input(kQ, key.windows[0]);
  const auto k = input(kK, key.windows[1]);
  const auto v = input(kV, key.windows[2]);
  const Window statistics = statistics_window(key.windows[0]);
  AttentionPlan plan;
  try {
    if (key.backward) {
      const auto stats = input(kStats, statistics);
      stats->set_data_type(fe::DataType_t::FLOAT);
      const auto gradients = graph->sdpa_backward(
          q, k, v, input(kOut, key.windows[3]), input(kGradOut, key.windows[4]), stats,
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
    if (status.is_good()) status = graph->build_operation_graph(handle);
    if (status.is_good()) status = graph->create_execution_plans({fe::HeurMode_t::A});
    if (status.is_good()) status = graph->check_support();
    if (status.is_good()) status = graph->build_plans();
    if (status.is_good()) status = graph->get_workspace_size(plan.workspace_bytes);
    if (status.is_good())
      plan.graph = std::move(graph);
    else
      plan.why_not =
          fmt::format("{} does not support it: {}", cudnn_version(), status.get_message());
  } catch (const std::exception& error) {
    plan.why_not = fmt::format("{} does not support it: {}", cudnn_version(), error.what());
  }
  return plan;
}

}  // namespace tessera::kernels::cuda
