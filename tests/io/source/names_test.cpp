#include "io/source/names.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

TEST_CASE("wrapper prefixes are removed, however often they occur") {
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
  const auto strip_name = [](std::string_view source, const NameRules& rules) {
    return classify(source, "", false, rules).name;
  };
  for (const auto& [source, expected] : names) {
    CHECK(strip_name(source, {}) == expected);
    CHECK(strip_name(source, {.strip_wrappers = false}) == source);
  }
  const NameRules rules{.prefixes = {"app.", "model."}};
  CHECK(strip_name("app.model.model.x", rules) == "model.x");
  CHECK(strip_name("model.app.x", rules) == "app.x");
  CHECK(strip_name("_orig_mod.x", rules) == "_orig_mod.x");

  using Texts = std::vector<std::string>;
  CHECK(unused_prefixes({"app.model.x", "y"}, rules) == Texts{});
  CHECK(unused_prefixes({"model.x", "y"}, rules) == Texts{"app."});
  CHECK(unused_prefixes({"model.app.x"}, rules) == Texts{"app."});  // in the order of removal
  CHECK(unused_prefixes({"_orig_mod.x"}, rules) == Texts{"app.", "model."});
  CHECK(unused_prefixes({"model.x"}, {}) == Texts{});
}

TEST_CASE("a tensor's role depends on its path") {
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
      // FSDP of Hugging Face's Llama, saved flat: lm_head is a sibling of model.
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

/// Source name, outermost key, expected name.
struct HfRow {
  const char *source, *top_key, *name;
};

void check_hf_names(const char* what, const std::vector<HfRow>& rows, bool headless = false) {
  CAPTURE(what);
  std::vector<KeyedName> keys;
  for (const HfRow& row : rows) keys.push_back({row.source, row.top_key});
  const NameNesting nesting = find_nesting(keys);
  NameRules rules;
  const auto all = [&] {
    std::vector<TensorName> names;
    for (const KeyedName& key : keys) names.push_back(classify(key, nesting, rules));
    return names;
  };
  rules.model_levels = NameRules::ModelLevels{};
  rules.model_levels = count_model_levels(all(), headless);
  const auto names = all();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(rows[i].source);
    CHECK(names[i].name == rows[i].name);
    CHECK(names[i].source == rows[i].source);
  }
}

TEST_CASE("names are mapped to Hugging Face's, with or without model.") {
  check_hf_names("flat, untied", {{"model.layers.0.w", "", "model.layers.0.w"},
                                  {"model.norm.weight", "", "model.norm.weight"},
                                  {"lm_head.weight", "", "lm_head.weight"}});
  check_hf_names("flat, tied", {{"model.embed_tokens.weight", "", "model.embed_tokens.weight"},
                                {"model.layers.0.w", "", "model.layers.0.w"},
                                {"model.norm.weight", "", "model.norm.weight"}});
  check_hf_names("Lightning, untied", {{"model.model.layers.0.w", "", "model.layers.0.w"},
                                       {"model.lm_head.weight", "", "lm_head.weight"}});
  check_hf_names("Lightning, tied",
                 {{"model.model.layers.0.w", "", "model.layers.0.w"},
                  {"model.model.embed_tokens.weight", "", "model.embed_tokens.weight"}});
  check_hf_names("under a key, untied", {{"model.model.layers.0.w", "model", "model.layers.0.w"},
                                         {"model.lm_head.weight", "model", "lm_head.weight"}});
  check_hf_names("under a key, tied", {{"model.model.layers.0.w", "model", "model.layers.0.w"}});
  check_hf_names("under a key, without head", {{"model.layers.0.w", "model", "layers.0.w"},
                                               {"model.norm.weight", "model", "norm.weight"},
                                               {"ema.norm.weight", "ema", "ema.norm.weight"}});
  check_hf_names("Lightning's key and attribute",
                 {{"state_dict.model.model.layers.0.w", "state_dict", "model.layers.0.w"},
                  {"state_dict.model.lm_head.weight", "state_dict", "lm_head.weight"}});
  check_hf_names("a key that is a module", {{"layers.0.w", "layers", "layers.0.w"}});
  check_hf_names("wrappers and module.",
                 {{"module.model._orig_mod.module.model.layers.0._checkpoint_wrapped_module.w", "",
                   "model.layers.0.w"},
                  {"module.model._orig_mod.lm_head.weight", "", "lm_head.weight"},
                  {"model._fsdp_wrapped_module.model.norm.weight", "", "model.norm.weight"}});
  check_hf_names("module. inside",
                 {{"model.module.x", "", "x"}, {"model.y.module.x", "", "y.module.x"}});
  check_hf_names("no model. of its own", {{"model.gpt_neox.layers.0.w", "", "gpt_neox.layers.0.w"},
                                          {"model.embed_out.weight", "", "embed_out.weight"}});
  check_hf_names("no model. of its own, twice",
                 {{"model.model.transformer.h.0.w", "", "transformer.h.0.w"}});
  check_hf_names("a head beside the decoder", {{"model.layers.0.w", "", "layers.0.w"},
                                               {"model.lm_head.weight", "", "lm_head.weight"}});
  check_hf_names("OPT", {{"model.decoder.layers.0.w", "", "model.decoder.layers.0.w"}});
  check_hf_names("T5", {{"model.shared.weight", "", "shared.weight"},
                        {"model.encoder.block.0.w", "", "encoder.block.0.w"},
                        {"model.lm_head.weight", "", "lm_head.weight"}});
  check_hf_names("T5, tied",
                 {{"model.shared.weight", "", "shared.weight"},
                  {"model.decoder.embed_tokens.weight", "", "decoder.embed_tokens.weight"},
                  {"model.decoder.block.0.w", "", "decoder.block.0.w"}});
  check_hf_names("BART", {{"model.shared.weight", "", "model.shared.weight"},
                          {"model.encoder.layers.0.w", "", "model.encoder.layers.0.w"}});
  check_hf_names("a decoder with pictures",
                 {{"model.model.language_model.layers.0.w", "", "model.language_model.layers.0.w"},
                  {"model.model.visual.blocks.0.w", "", "model.visual.blocks.0.w"}});
  check_hf_names(
      "decoders with pictures that have one around the layers",
      {{"model.language_model.encoder.layers.0.w", "", "model.language_model.encoder.layers.0.w"},
       {"model.visual.blocks.0.w", "", "model.visual.blocks.0.w"}});
  check_hf_names("such a one with a head inside",
                 {{"model.language_model.model.layers.0.w", "", "language_model.model.layers.0.w"},
                  {"model.language_model.lm_head.weight", "", "language_model.lm_head.weight"},
                  {"model.vision_tower.w", "", "vision_tower.w"}});
  check_hf_names("LlamaModel", {{"model.model.layers.0.w", "", "layers.0.w"}}, /*headless=*/true);
}

TEST_CASE("optimizer state has its weights' names, also after the mapping to Hugging Face's") {
  check_hf_names("flat",
                 {{"model.layers.0.w", "", "model.layers.0.w"},
                  {"lm_head.weight", "", "lm_head.weight"},
                  {"optimizer.state.model.layers.0.w.exp_avg", "", "exp_avg/model.layers.0.w"},
                  {"optimizer.state.lm_head.weight.step", "", "step/lm_head.weight"}});
  check_hf_names(
      "under a key, of which state knows nothing",
      {{"model.model.layers.0.w", "model", "model.layers.0.w"},
       {"optim.state._orig_mod.model.layers.0.w.exp_avg", "optim", "exp_avg/model.layers.0.w"},
       {"optim.param_groups.0.lr", "optim", "optim.param_groups.0.lr"}});
  check_hf_names("the same, where nothing says that it is a key",
                 {{"model.model.layers.0.w", "", "model.layers.0.w"},
                  {"model.lm_head.weight", "", "lm_head.weight"},
                  {"optimizer.state.model.layers.0.w.exp_avg", "", "exp_avg/model.layers.0.w"},
                  {"optimizer.state.lm_head.weight.exp_avg", "", "exp_avg/lm_head.weight"}});
  check_hf_names("Lightning", {{"model.model.model.layers.0.w", "model", "model.layers.0.w"},
                               {"model.model.lm_head.weight", "model", "lm_head.weight"},
                               {"optimizer_0.state.model.model.layers.0.w.exp_avg", "optimizer_0",
                                "exp_avg/model.layers.0.w"},
                               {"optimizer_0.state.model.lm_head.weight.exp_avg", "optimizer_0",
                                "exp_avg/lm_head.weight"}});
  check_hf_names(
      "named in the wrapped module",
      {{"model.model.layers.0.w", "model", "model.layers.0.w"},
       {"optimizer_0.state.layers.0.w.exp_avg", "optimizer_0", "exp_avg/model.layers.0.w"}});
  check_hf_names("without weights",
                 {{"optim.state.model.model.layers.0.w.exp_avg", "", "exp_avg/model.layers.0.w"},
                  {"optim.state.model.lm_head.weight.exp_avg", "", "exp_avg/lm_head.weight"}});
}

TEST_CASE("an outer key around model and optimizer is removed from names") {
  const char* const app = "app";
  check_hf_names("PyTorch's recipe",
                 {{"app.model.model.layers.0.w", app, "model.layers.0.w"},
                  {"app.model.lm_head.weight", app, "lm_head.weight"},
                  {"app.optim.state.model.layers.0.w.exp_avg", app, "exp_avg/model.layers.0.w"},
                  {"app.optim.param_groups.0.lr", app, "app.optim.param_groups.0.lr"}});
  check_hf_names("without optimizer", {{"app.model.model.layers.0.w", app, "model.layers.0.w"},
                                       {"app.model.model.norm.weight", app, "model.norm.weight"}});
  check_hf_names("Composer", {{"state.model.model.layers.0.w", "state", "model.layers.0.w"},
                              {"state.optimizers.AdamW.state.model.layers.0.w.exp_avg", "state",
                               "state.optimizers.AdamW.state.model.layers.0.w.exp_avg"},
                              {"rng.0.torch", "rng", "rng.0.torch"}});
  check_hf_names("where nothing says that it is a key",
                 {{"app.model.model.layers.0.w", "", "model.layers.0.w"},
                  {"app.optim.state.model.layers.0.w.exp_avg", "", "exp_avg/model.layers.0.w"}});
  check_hf_names("a part of names",
                 {{"language_model.model.layers.0.w", "", "language_model.model.layers.0.w"}});
  check_hf_names("another beside it",
                 {{"app.model.layers.0.w", app, "app.model.layers.0.w"}, {"step", "", "step"}});

  const std::vector<KeyedName> all{
      {"app.model.x", app}, {"app.optim.state.x.exp_avg", app}, {"app.train_state.step", app}};
  const NameNesting nesting = find_nesting(all);
  CHECK(nesting.outer == "app");
  CHECK(classify(all[0], nesting, {}).role == TensorRole::Weight);
  CHECK(classify(all[1], nesting, {}).role == TensorRole::OptimizerState);
  CHECK(classify(all[2], nesting, {}).role == TensorRole::Other);
  // The user's rules apply to whole names.
  CHECK(classify(all[0], nesting, {.strip_wrappers = false}).name == "app.model.x");
  CHECK(classify(all[0], nesting, {.prefixes = {"app.model."}}).name == "x");
  for (const KeyedName bad : {KeyedName{"app", app}, {"app.", app}, {"ap", app}, {"app.x", app}}) {
    CHECK(find_nesting({all[0], all[1], bad}).outer.empty());
  }
}

TEST_CASE("if two names become equal, the error lists both") {
  const auto names = [](const std::vector<const char*>& sources) {
    std::vector<TensorName> result;
    for (const char* source : sources) result.push_back(classify(source, "", false, {}));
    return result;
  };
  check_distinct(names({"a", "b", "optimizer.state.a.exp_avg"}), "dir");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "dir: x and model.module.x would both get the name x; choose the prefixes",
                       check_distinct(names({"x", "model.module.x"}), "dir"));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "optimizer_0.state.x.exp_avg and optimizer_1.state.x.exp_avg would both get the name "
      "exp_avg/x",
      check_distinct(names({"optimizer_0.state.x.exp_avg", "optimizer_1.state.x.exp_avg"}), "dir"));
  CHECK_THROWS_HOLDING(InvalidArgument, "the name model. is empty",
                       check_distinct(names({"model."}), "dir"));
}

TEST_CASE("patterns are a shell's, and * crosses dots") {
  const std::vector<std::string> patterns{"h.0.*", "*.bias", "wt?.weight", "h.[2-4].ln_1.weight"};
  for (const char* name : {"h.0.attn.c_attn.weight", "ln_f.bias", "h.11.mlp.c_fc.bias",
                           "wte.weight", "h.3.ln_1.weight"}) {
    CAPTURE(name);
    CHECK(is_chosen(patterns, name));
    CHECK(is_chosen({}, name));
  }
  for (const char* name : {"h.01.weight", "h.5.ln_1.weight", "ln_f.weight", "xwte.weight", ""}) {
    CAPTURE(name);
    CHECK_FALSE(is_chosen(patterns, name));
  }
}

TEST_CASE("patterns without a match are refused all at once") {
  const std::vector<std::string> names{"wte.weight", "h.0.ln_1.bias"};
  CHECK_NOTHROW(check_patterns({"h.*", "*"}, names, "--tensors", "x"));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "--tensors: wpe.*, h.1.* match no tensor of x, with names such as wte.weight",
      check_patterns({"wpe.*", "h.*", "h.1.*"}, names, "--tensors", "x"));
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors: a matches no tensor of x",
                       check_patterns({"a"}, {}, "--tensors", "x"));
}

}  // namespace
}  // namespace tessera::io
