#include "io/source/names.h"

#include <doctest/doctest.h>

#include <array>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

using Texts = std::vector<std::string>;

/// Names and roles of tensors, each with its outermost key.
std::vector<TensorName> name_all(const std::vector<KeyedName>& tensors,
                                 const NameRules& rules = {}) {
  return name_tensors(tensors, rules, "dir");
}

std::string name_of(const char* source, const NameRules& rules = {}) {
  return name_all({{source, ""}}, rules).front().str();
}

TEST_CASE("parts that wrappers add are removed, and nothing else") {
  const std::pair<const char*, const char*> names[] = {
      {"wte.weight", "wte.weight"},
      {"model.wte.weight", "model.wte.weight"},
      {"module.model.module.model.wte.weight", "module.model.module.model.wte.weight"},
      {"_orig_mod.module.wte.weight", "module.wte.weight"},
      {"model._fsdp_wrapped_module._orig_mod.h.0.ln_1.weight", "model.h.0.ln_1.weight"},
      {"h.0._fsdp_wrapped_module._checkpoint_wrapped_module.attn.weight", "h.0.attn.weight"},
      {"my_orig_mod.weight", "my_orig_mod.weight"},
      {"_orig_mod", "_orig_mod"},
      {"..", ".."},
  };
  for (const auto& [source, expected] : names) {
    CHECK(name_of(source) == expected);
    CHECK(name_of(source, {.strip_wrappers = false}) == source);
  }
}

TEST_CASE("prefixes and renames apply in order, and each must change a name") {
  NameRules rules{.strip_wrappers = false, .prefixes = {"app.", "model."}};
  const auto all =
      name_all({{"app.model.model.x", ""}, {"model.app.x", ""}, {"_orig_mod.x", ""}}, rules);
  CHECK(all[0].name == "model.x");
  CHECK(all[1].name == "app.x");
  CHECK(all[2].name == "_orig_mod.x");
  CHECK_THROWS_HOLDING(InvalidArgument, "--strip app. changes no name; the first are model.x, y",
                       name_all({{"model.x", ""}, {"y", ""}}, rules));
  // A prefix may be in names of optimizer state only.
  CHECK(name_all({{"x", ""}, {"optim.state.app.model.x.exp_avg", ""}}, rules)[1].str() ==
        "exp_avg/x");

  rules = {.renames = {"s/^blocks\\.([0-9]+)/layers.$1/", "s|\\.w$|.weight|"}};
  CHECK(name_all({{"blocks.12.w", ""}, {"optim.state.blocks.12.w.exp_avg", ""}}, rules)[1].str() ==
        "exp_avg/layers.12.weight");
  CHECK(name_of("_orig_mod.blocks.3.w", rules) == "layers.3.weight");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "--rename s|\\.w$|.weight| changes no name; the first are layers.1.x",
                       name_of("blocks.1.x", rules));
  for (const char* bad : {"", "s", "s/a/b", "s//b/", "s/a/b/g", "a/b/c/", "s/a(/b/", "s/a/b/c/"}) {
    CAPTURE(bad);
    CHECK_THROWS_HOLDING(InvalidArgument, "give s/OLD/NEW/, such as 's/^blocks\\./layers./'",
                         name_of("a", {.renames = {bad}}));
  }
  // Recursion of regular expressions is bounded: longer names stay.
  const std::string endless(std::size_t{1} << 20, 'a');
  CHECK_THROWS_HOLDING(InvalidArgument, "changes no name",
                       name_of(endless.c_str(), {.renames = {"s/(a|b)*c/d/"}}));
}

TEST_CASE("a tensor's role depends on its path") {
  struct Row {
    const char *source, *top_key;
    bool keyed;  // another tensor is under the key model
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
      {"model.norm.weight", "", false, TensorRole::Weight, "model.norm.weight"},
      {"lm_head.weight", "", false, TensorRole::Weight, "lm_head.weight"},
      // a dict of dicts
      {"model.x", "model", true, TensorRole::Weight, "x"},
      {"ema.x", "ema", true, TensorRole::Other, "ema.x"},
      {"step", "", true, TensorRole::Other, "step"},
      {"optim.state.model._orig_mod.x.exp_avg_sq", "optim", true, TensorRole::OptimizerState,
       "exp_avg_sq/model.x"},
      {"optim.param_groups.0.lr", "optim", true, TensorRole::OptimizerState,
       "optim.param_groups.0.lr"},
      // Lightning
      {"optimizer_0.state.model.x.step", "optimizer_0", true, TensorRole::OptimizerState,
       "step/model.x"},
      {"optimizer_x.weight", "", false, TensorRole::Weight, "optimizer_x.weight"},
      {"optimizer.state.", "", false, TensorRole::OptimizerState, "optimizer.state."},
  };
  for (const Row& row : rows) {
    CAPTURE(row.source);
    std::vector<KeyedName> all{{row.source, row.top_key}};
    if (row.keyed) all.push_back({"model.y", "model"});
    const TensorName name = name_all(all).front();
    CHECK(name.source == row.source);
    CHECK(name.str() == row.name);
    CHECK(name.role == row.role);
  }
}

TEST_CASE("a list of optimizers has their numbers in the names of state") {
  const auto found =
      name_all({{"model.1.w", "model"}, {"optimizers.0.state.1.w.exp_avg", "optimizers"}}, {});
  CHECK(found[1].role == TensorRole::OptimizerState);
  CHECK(found[1].kind == "exp_avg");
  CHECK(found[1].name == "1.w");
  CHECK(found[0].name == "1.w");
}

TEST_CASE("flattened state of an optimizer may be beside the weights") {
  const auto names = name_all({{"model.x.weight", ""},
                               {"state.model.x.weight.exp_avg", ""},
                               {"state.y.weight", ""},
                               {"state.z.exp_avg", ""}});
  CHECK(names[1].role == TensorRole::OptimizerState);
  CHECK(names[1].str() == "exp_avg/model.x.weight");
  // A module of the model may be called state.
  for (const std::size_t i : {0, 2, 3}) CHECK(names[i].role == TensorRole::Weight);
}

TEST_CASE("--select and --exclude choose weights by their names at the source") {
  const std::vector<KeyedName> all{{"model.x", "model"},
                                   {"model.loss.w", "model"},
                                   {"ema.x", "ema"},
                                   {"optim.state.x.exp_avg", "optim"}};
  const auto roles = [&](const NameRules& rules) {
    std::string text;
    for (const TensorName& name : name_all(all, rules))
      text += name.role == TensorRole::Weight ? 'w' : name.role == TensorRole::Other ? '-' : 'o';
    return text;
  };
  CHECK(roles({}) == "ww-o");
  CHECK(roles({.select = {"ema.*"}}) == "--wo");
  CHECK(roles({.exclude = {"*loss*"}}) == "w--o");
  CHECK(roles({.select = {"model.*", "ema.*"}, .exclude = {"*.x"}}) == "-w-o");
  CHECK(name_all(all, {.select = {"ema.*"}})[0].why == std::string("not selected by --select"));
  CHECK(name_all(all, {.exclude = {"*loss*"}})[1].why == std::string("left out by --exclude"));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "--select: net.* matches no tensor of dir, with names such as model.x, "
                       "model.loss.w, ema.x",
                       roles({.select = {"net.*"}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "--exclude: optim.* matches no tensor",
                       roles({.exclude = {"optim.*"}}));
}

TEST_CASE("an outer key around model and optimizer is removed from names") {
  const char* const app = "app";
  const auto check = [](const std::vector<std::array<const char*, 3>>& rows) {
    std::vector<KeyedName> keys;
    for (const auto& [source, key, name] : rows) keys.push_back({source, key});
    const auto names = name_all(keys);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CAPTURE(rows[i][0]);
      CHECK(names[i].str() == rows[i][2]);
      CHECK(names[i].source == rows[i][0]);
    }
  };
  // PyTorch's recipe
  check({{"app.model.model.layers.0.w", app, "model.layers.0.w"},
         {"app.model.lm_head.weight", app, "lm_head.weight"},
         {"app.optim.state.model.layers.0.w.exp_avg", app, "exp_avg/model.layers.0.w"},
         {"app.optim.param_groups.0.lr", app, "app.optim.param_groups.0.lr"}});
  // without optimizer, model may be a part of the names
  check({{"app.model.norm.weight", app, "model.norm.weight"}});
  // Composer
  check({{"state.model.model.layers.0.w", "state", "model.layers.0.w"},
         {"state.optimizers.AdamW.state.model.layers.0.w.exp_avg", "state",
          "state.optimizers.AdamW.state.model.layers.0.w.exp_avg"},
         {"rng.0.torch", "rng", "rng.0.torch"}});
  // where nothing says that it is a key
  check({{"app.model.model.layers.0.w", "", "model.layers.0.w"},
         {"app.optim.state.model.layers.0.w.exp_avg", "", "exp_avg/model.layers.0.w"}});
  // a part of names
  check({{"language_model.model.layers.0.w", "", "language_model.model.layers.0.w"}});
  // another beside it
  check({{"app.model.layers.0.w", app, "app.model.layers.0.w"}, {"step", "", "step"}});

  const std::vector<KeyedName> all{
      {"app.model.x", app}, {"app.optim.state.x.exp_avg", app}, {"app.train_state.step", app}};
  CHECK(name_all(all)[0].role == TensorRole::Weight);
  CHECK(name_all(all)[1].role == TensorRole::OptimizerState);
  CHECK(name_all(all)[2].role == TensorRole::Other);
  // The user's rules apply to whole names.
  CHECK(name_all(all, {.strip_wrappers = false})[0].name == "app.model.x");
  CHECK(name_all(all, {.strip_wrappers = false, .prefixes = {"app.model."}})[0].name == "x");
  for (const KeyedName bad : {KeyedName{"app", app}, {"app.", app}, {"ap", app}, {"app.x", app}})
    CHECK(name_all({all[0], all[1], bad})[0].name == "app.model.x");
}

TEST_CASE("if two names become equal, the error lists both") {
  const auto names = [](const std::vector<const char*>& sources) {
    std::vector<KeyedName> keys;
    for (const char* source : sources) keys.push_back({source, ""});
    return name_all(keys);
  };
  check_distinct(names({"a", "b", "optimizer.state.a.exp_avg"}), "dir");
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "dir: x and _orig_mod.x would both get the name x; choose one with --select",
                       check_distinct(names({"x", "_orig_mod.x"}), "dir"));
  CHECK_THROWS_HOLDING(
      InvalidArgument,
      "optimizer_0.state.x.exp_avg and optimizer_1.state.x.exp_avg would both get the name "
      "exp_avg/x",
      check_distinct(names({"optimizer_0.state.x.exp_avg", "optimizer_1.state.x.exp_avg"}), "dir"));
  CHECK_THROWS_HOLDING(InvalidArgument, "the name _orig_mod. is empty",
                       check_distinct(names({"_orig_mod."}), "dir"));
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
      "--tensors: wpe.*, h.1.* match no tensor of x, with names such as wte.weight, h.0.ln_1.bias",
      check_patterns({"wpe.*", "h.*", "h.1.*"}, names, "--tensors", "x"));
  CHECK_THROWS_HOLDING(InvalidArgument, "--tensors: a matches no tensor of x",
                       check_patterns({"a"}, {}, "--tensors", "x"));
}

}  // namespace
}  // namespace tessera::io
