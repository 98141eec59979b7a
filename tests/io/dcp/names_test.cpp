#include "io/source/names.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

TEST_CASE("prefixes of wrappers are removed as often as they stand there") {
  const std::pair<const char*, const char*> names[] = {
      {"wte.weight", "wte.weight"},
      {"model.wte.weight", "wte.weight"},
      {"module.model.module.model.wte.weight", "wte.weight"},
      {"_orig_mod.module.wte.weight", "wte.weight"},
      {"model._fsdp_wrapped_module._orig_mod.model.h.0.ln_1.weight", "h.0.ln_1.weight"},
      {"h.0._fsdp_wrapped_module._checkpoint_wrapped_module.attn.weight", "h.0.attn.weight"},
      {"h.0.model.weight", "h.0.model.weight"},  // a module's own name
      {"models.weight", "models.weight"},
      {"my_orig_mod.weight", "my_orig_mod.weight"},
      {"_orig_mod", "_orig_mod"},
      {"model.", ""},
      {"..", ".."},
  };
  for (const auto& [source, expected] : names) {
    CHECK(strip_name(source, {}) == expected);
    CHECK(strip_name(source, {.strip_wrappers = false}) == source);
  }
  const NameRules rules{.prefixes = {"app.", "model."}};
  CHECK(strip_name("app.model.model.x", rules) == "model.x");
  CHECK(strip_name("model.app.x", rules) == "app.x");
  CHECK(strip_name("_orig_mod.x", rules) == "_orig_mod.x");
}

TEST_CASE("what a tensor is, is told by where it lies") {
  struct Row {
    const char *source, *top_key;
    bool keyed;
    TensorRole role;
    const char* name;
  };
  const Row rows[] = {
      // torchtitan: a flat dict, weights without prefix
      {"layers.0.weight", "", false, TensorRole::Weight, "layers.0.weight"},
      {"optimizer.state.layers.0.weight.exp_avg", "", false, TensorRole::OptimizerState,
       "exp_avg/layers.0.weight"},
      {"train_state.step", "", false, TensorRole::Other, "train_state.step"},
      {"lr_scheduler.x", "", false, TensorRole::Other, "lr_scheduler.x"},
      // FSDP of Hugging Face's Llama, saved flat: lm_head lies beside model
      {"model.norm.weight", "", false, TensorRole::Weight, "norm.weight"},
      {"lm_head.weight", "", false, TensorRole::Weight, "lm_head.weight"},
      // a dict of dicts
      {"model.x", "model", true, TensorRole::Weight, "x"},
      {"ema.x", "ema", true, TensorRole::Other, "ema.x"},
      {"step", "", true, TensorRole::Other, "step"},
      {"optim.state.model._orig_mod.x.exp_avg_sq", "optim", true, TensorRole::OptimizerState,
       "exp_avg_sq/x"},
      {"optim.param_groups.0.lr", "optim", true, TensorRole::OptimizerState,
       "optim.param_groups.0.lr"},
      // Lightning
      {"optimizer_0.state.model.x.step", "optimizer_0", true, TensorRole::OptimizerState, "step/x"},
      {"optimizer_x.weight", "", false, TensorRole::Weight, "optimizer_x.weight"},
      {"optimizer.state.", "", false, TensorRole::OptimizerState, "optimizer.state."},
  };
  for (const Row& row : rows) {
    CAPTURE(row.source);
    const TensorName name = classify(row.source, row.top_key, row.keyed, {});
    CHECK(name.source == row.source);
    CHECK(name.name == row.name);
    CHECK(name.role == row.role);
  }
}

TEST_CASE("two names that become one are named both") {
  const auto names = [](const std::vector<const char*>& sources) {
    std::vector<TensorName> result;
    for (const char* source : sources) result.push_back(classify(source, "", false, {}));
    return result;
  };
  check_distinct(names({"a", "b", "optimizer.state.a.exp_avg"}), "dir");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "dir: x and model.module.x would both be called x; choose what is removed",
                       check_distinct(names({"x", "model.module.x"}), "dir"));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "optimizer_0.state.x.exp_avg and optimizer_1.state.x.exp_avg would both be called exp_avg/x",
      check_distinct(names({"optimizer_0.state.x.exp_avg", "optimizer_1.state.x.exp_avg"}), "dir"));
  CHECK_THROWS_HOLDING(InvalidArgument, "nothing is left of the name model.",
                       check_distinct(names({"model."}), "dir"));
}

}  // namespace
}  // namespace tessera::io
