// cuDNN's plans of attention for an H100, made without a GPU: there is one for every shape, and its workspace is what a
// memory plan books.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/context.h"
#include "core/base/memory.h"
#include "kernels/attention.h"
#include "kernels/cuda/cudnn/attention_plan.h"
#include "kernels/scratch.h"
#include "models/presets.h"

namespace tessera::test {
namespace {

using namespace kernels;
using namespace kernels::cuda;

constexpr std::string_view kH100 = R"({"version": "1.0", "cudaDeviceId": 0,
    "deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "driverVer": 13000,
    "multiProcessorCount": 132, "warpSize": 32, "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "maxThreadsDim": [1024, 1024, 64], "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 9008, "isTccDriver": 0,
    "supportCoopLaunch": 1, "totalGlobalMem": 85029158912, "smClockRateKHz": 1980000,
    "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "l2PersistingSize": 0})";

AttentionPlan plan_on_h100(const AttentionKey& key) {
  static const auto kDevice = [] {
    auto device = std::make_shared<fe::DeviceProperties>();
    fe::error_t status = device->deserialize({kH100.begin(), kH100.end()});
    REQUIRE_MESSAGE(status.is_good(), status.get_message());
    return device;
  }();
  auto graph = std::make_unique<fe::graph::Graph>();
  graph->set_device_properties(kDevice).set_sm_version(90);
  return make_plan(key, nullptr, std::move(graph));
}

struct Sizes {
  std::int64_t batch, tokens, heads, kv_heads, dim;
};

/// Queries, keys and values as parts of one buffer; out.
struct Views {
  TensorView q, k, v, out, log_sum_exp;
};
Views views_of(const Sizes& s) {
  const Device meta{DeviceType::Meta, 0};
  const TensorView qkv =
      dense_view(nullptr, DType::BF16, {s.batch, s.tokens, s.heads + 2 * s.kv_heads, s.dim}, meta);
  return {qkv.narrow(2, 0, s.heads), qkv.narrow(2, s.heads, s.kv_heads),
          qkv.narrow(2, s.heads + s.kv_heads, s.kv_heads),
          dense_view(nullptr, DType::BF16, {s.batch, s.tokens, s.heads, s.dim}, meta),
          dense_view(nullptr, DType::F32, {s.batch, s.heads, s.tokens}, meta)};
}

/// Workspace of a backward pass, and what a memory plan books for it. slice: sequences at a time; 0: cuDNN isn't used.
struct Backward {
  std::string why_not;
  std::int64_t slice = 0, bytes = 0, booked = 0;
};
Backward backward_of(const Sizes& sizes, bool deterministic) {
  const auto context =
      Context::create({.device = {DeviceType::Meta, 0}, .planned = {DeviceType::CUDA, 0}});
  context->set_deterministic(deterministic);
  const Views at = views_of(sizes);
  const auto wanted = [](const TensorView& view) { return GradientView{view, false, true}; };
  const AttentionBackward args{at.q,   at.k,         at.v,         at.out,       at.log_sum_exp,
                               at.out, wanted(at.q), wanted(at.k), wanted(at.v), 0.125F};
  attention_backward(*context, args);

  Backward found;
  const auto& libraries = context->planned_libraries();
  if (const auto booked = libraries.find("cuDNN attention"); booked != libraries.end())
    found.booked = booked->second;
  std::map<std::int64_t, AttentionPlan> plans;
  const auto plan_of = [&](std::int64_t sequences) -> const AttentionPlan& {
    if (!plans.contains(sequences))
      plans[sequences] = plan_on_h100(key_of(args, deterministic).with_batch(sequences));
    return plans[sequences];
  };
  found.slice = sizes.batch;
  std::optional<Workspace> workspace;
  found.why_not = take_sliced_workspace(*context, "cuDNN attention", sizes.batch, plan_of,
                                        attention_workspace_fits, found.slice, workspace);
  if (!workspace) found.slice = 0;
  found.bytes =
      static_cast<std::int64_t>(context->ledger().usage(MemoryCategory::Workspace).current);
  return found;
}

/// @return sequences at a time
std::int64_t check_backward(const Sizes& sizes, bool deterministic, bool print = false) {
  const Backward found = backward_of(sizes, deterministic);
  const std::string row =
      fmt::format("| {} | {} | {}/{} | {} | {} | {} | {} | {} |", sizes.batch, sizes.tokens,
                  sizes.heads, sizes.kv_heads, sizes.dim, deterministic ? "yes" : "no", found.slice,
                  found.bytes, found.booked);
  if (print) fmt::print("{}\n", row);
  CAPTURE(row);
  CHECK(found.bytes == found.booked);
  if (found.slice == 0)
    CHECK(found.why_not.starts_with("its workspace would be"));
  else
    CHECK(found.why_not == "");
  return found.slice;
}

void check_forward(const Sizes& sizes, bool training = true) {
  const Views at = views_of(sizes);
  const AttentionPlan plan = plan_on_h100(key_of(AttentionForward{
      at.q, at.k, at.v, at.out, training ? at.log_sum_exp : TensorView{}, 0.125F}));
  CHECK(plan.why_not == "");
  CHECK(plan.workspace_bytes <= 256);  // not booked
}

/// Heads of the presets: {heads, kv_heads, dim}.
std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> heads_of_presets() {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> all;
  for (const models::Preset& preset : models::presets()) {
    const models::Arch arch = models::arch_of_preset(preset.name);
    all.emplace(arch.n_head, arch.kv_heads(), arch.width_of_head());
  }
  return all;
}

}  // namespace

TEST_CASE("cuDNN has plans for the heads of every preset") {
  std::set<std::pair<bool, std::int64_t>> seen;
  for (const auto& [heads, kv_heads, dim] : heads_of_presets()) {
    if (!seen.emplace(heads == kv_heads, dim).second) continue;  // differs in the number of heads
    const Sizes sizes{2, 1024, heads, kv_heads, dim};
    CAPTURE(heads);
    CAPTURE(dim);
    check_forward(sizes);
    CHECK(check_backward(sizes, true) == 2);
    CHECK(check_backward(sizes, false) == 2);
  }
}

TEST_CASE("cuDNN has plans for few and odd tokens, for other head dims, and without training") {
  check_forward({2, 1000, 32, 8, 128}, false);
  for (const Sizes& sizes : {Sizes{3, 2, 4, 4, 64},
                             {2, 64, 4, 2, 256},
                             {3, 77, 9, 3, 64},
                             {1, 1000, 12, 12, 64},
                             {2, 192, 4, 4, 80},
                             {2, 129, 4, 2, 104}}) {
    for (const bool deterministic : {true, false})
      CHECK(check_backward(sizes, deterministic) == sizes.batch);
  }
}

TEST_CASE("a batch whose workspace is above the limit runs in slices") {
  CHECK(check_backward({64, 1024, 12, 12, 64}, true) == 32);
  CHECK(check_backward({64, 1024, 12, 12, 64}, false) == 64);
  CHECK(check_backward({96, 1024, 12, 12, 64}, true) == 48);
  CHECK(check_backward({5, 4096, 16, 16, 64}, true) == 2);
  CHECK(check_backward({2, 4096, 32, 8, 128}, true) == 1);
  CHECK(check_backward({1, 8192, 12, 12, 64}, true) == 1);
  CHECK(check_backward({1, 8192, 32, 8, 128}, false) == 1);
  CHECK(check_backward({2, 8192, 32, 8, 128}, true) == 0);  // tessera's own kernel
}

// Half an hour: cudnn_plans_test --no-skip
TEST_CASE("all presets, tokens and batches" * doctest::skip()) {
  fmt::print(
      "| B | T | heads | D | deterministic | slice | workspace | booked |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const auto& [heads, kv_heads, dim] : heads_of_presets()) {
    for (const std::int64_t tokens : {64, 1000, 1024, 2048, 4096, 8192}) {
      for (const std::int64_t batch : {1, 8, 96}) {
        const Sizes sizes{batch, tokens, heads, kv_heads, dim};
        check_forward(sizes);
        for (const bool deterministic : {true, false}) check_backward(sizes, deterministic, true);
      }
    }
  }
}

}  // namespace tessera::test
