// LoRA adapters against PEFT: tests/golden/lora.json, made by make_lora.py.
#include "io/hf/lora.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "core/autograd/autograd.h"
#include "io/base/file.h"
#include "io/hf/model_source.h"
#include "models/language_model.h"
#include "tests/models/golden_models.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using io::Json;

namespace {

struct LoraCase {
  test::Case model;
  Json adapter;
  test::TempDir base, dir;

  explicit LoraCase(const Json& json) : model(json), adapter(json.at("adapter")) {
    test::write_model(model, base);
    adapter["base_model_name_or_path"] = base.path().string();
    write_adapter();
  }
  void write_adapter() const {
    std::vector<io::SafetensorsSpec> specs;
    for (const auto& [name, sizes] : model.json.at("shapes").items())
      specs.push_back(
          {name, DType::F32, {sizes[0].get<std::int64_t>(), sizes[1].get<std::int64_t>()}});
    test::write_weights(dir, "adapter_model.safetensors", specs);
    dir.write("adapter_config.json", adapter.dump());
  }
};

double largest_difference(const std::vector<double>& got, const Json& want) {
  double most = 0;
  std::size_t i = 0;
  for (const auto& row : want)
    for (const double value : row) most = std::max(most, std::abs(got[i++] - value));
  return most;
}

template <typename F>
void for_each_case(const F& f) {
  const Json file = Json::parse(
      io::read_file(test::source_path("tests/golden/lora.json"), std::int64_t{1} << 24));
  for (const Json& json : file.at("cases")) {
    const auto label = json.at("label").get<std::string>();
    CAPTURE(label);
    f(LoraCase(json));
  }
}

}  // namespace

TEST_CASE("adapters have PEFT's logits and gradients, on frozen weights") {
  int trained = 0;
  for_each_case([&](const LoraCase& c) {
    const auto base = io::open_model(c.base.path());
    const io::PeftAdapter adapter = io::open_peft(c.dir.path(), base->config());
    if (adapter.rank == 0) return;  // of several ranks: read, not trained
    ++trained;
    models::Arch arch = models::parse_arch(base->config().dump(), "config.json");
    arch.lora =
        models::Lora{.rank = adapter.rank, .alpha = adapter.alpha, .targets = adapter.targets};
    const auto model = models::make_model(arch);
    const auto context = Context::create();
    materialize(*model, context, DType::F64,
                [&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                  const bool own = p.tensor.requires_grad();
                  const io::TensorSource& source = own ? *adapter.source : *base;
                  source.read(p.name, begin, end, out, DType::F32);
                });
    const Tensor tokens = c.model.ids(context, "tokens"), targets = c.model.ids(context, "targets");
    const auto logits = model->logits(tokens).to_vector<double>();
    CHECK(largest_difference(logits, c.model.json.at("logits")) < 1e-5);
    const Tensor loss = model->loss(tokens, targets, 1.0 / static_cast<double>(tokens.numel()));
    CHECK(std::abs(loss.item() - c.model.json.at("loss").get<double>()) < 1e-6);
    autograd::backward(loss);
    std::map<std::string, std::string> names;
    for (const io::LoraLayer& layer : adapter.layers) {
      names[layer.a()] = layer.peft_name('A');
      names[layer.b()] = layer.peft_name('B');
    }
    const Json& gradients = c.model.json.at("gradients");
    std::size_t compared = 0;
    for (const Parameter* p : model->parameters()) {
      CAPTURE(p->name);
      CHECK(p->tensor.grad().defined() == names.contains(p->name));
      if (!names.contains(p->name)) continue;
      test::check_gradient(names[p->name], p->tensor.grad().to_vector<double>(),
                           gradients.at(names[p->name]), test::norm_of(gradients));
      ++compared;
    }
    CHECK(compared == gradients.size());

    // Through a checkpoint's section and PEFT's configuration.
    arch.lora->base = c.base.path().string();
    const Json section = Json::parse(models::to_json(arch));
    CHECK(models::to_json(models::parse_arch(section.dump(), "again")) == section.dump());
    CHECK(io::lora_tensors(section).size() == gradients.size());
    const Json config = io::peft_config(section);
    CHECK(config.at("r") == adapter.rank);
    CHECK(config.at("lora_alpha").get<double>() == doctest::Approx(adapter.alpha));
    c.dir.write("adapter_config.json", config.dump());
    CHECK(io::open_peft(c.dir.path(), base->config()).layers.size() == adapter.layers.size());
  });
  CHECK(trained == 4);
}

TEST_CASE("a directory of PEFT is a model: that of its base, with the adapters merged") {
  for_each_case([](const LoraCase& c) {
    for (const bool named : {true, false}) {
      const auto source =
          named ? io::open_model(c.dir.path())
                : io::open_model(c.dir.path(), {}, io::LoadPolicy::Exact, c.base.path());
      const auto model = models::make_model(models::parse_arch(source->config().dump(), "config"));
      const auto context = Context::create();
      const NoGradGuard no_grad(*context);
      // In pieces that begin and end within rows.
      materialize(*model, context, DType::F32,
                  [&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                    for (std::int64_t at = begin; at < end; at += 37)
                      source->read(p.name, at, std::min(at + 37, end), out + (at - begin),
                                   DType::F32);
                  });
      const auto logits = model->logits(c.model.ids(context, "tokens")).to_vector<float>();
      CHECK(largest_difference({logits.begin(), logits.end()}, c.model.json.at("logits")) < 2e-5);
    }
  });
}

TEST_CASE("adapters that can't be read are refused, with the reason") {
  const Json file = Json::parse(
      io::read_file(test::source_path("tests/golden/lora.json"), std::int64_t{1} << 24));
  LoraCase c(file.at("cases")[0]);
  const auto refuses = [&](const char* key, const Json& value, const std::string& text) {
    const Json before = c.adapter;
    c.adapter[key] = value;
    c.write_adapter();
    std::string found;
    try {
      (void)io::open_model(c.dir.path());
    } catch (const Error& error) {
      found = error.what();
    }
    CAPTURE(found);
    CHECK(found.find(text) != found.npos);
    c.adapter = before;
  };
  refuses("base_model_name_or_path", "google/gemma-2b", "name its directory with --base");
  refuses("peft_type", "IA3", "peft_type is IA3");
  refuses("use_dora", true, "use_dora is set");
  refuses("base_model_name_or_path", nullptr, "name its directory with --base");
  refuses("base_model_name_or_path", c.dir.path().string(), "is the base of its own adapters");
  refuses("init_lora_weights", "pissa", "init_lora_weights is \"pissa\"");
  refuses("bias", "all", "bias is \"all\"");
  refuses("modules_to_save", {"lm_head"}, "modules_to_save is set");
}

TEST_CASE("targets are names, paths or patterns; one that matches nothing lists the names") {
  const Json file = Json::parse(
      io::read_file(test::source_path("tests/golden/lora.json"), std::int64_t{1} << 24));
  const test::Case c(file.at("cases")[0]);
  const auto count = [&](const std::vector<std::string>& targets) {
    return io::lora_layers(c.config, targets).size();
  };
  CHECK(count({"all-linear"}) == 14);
  CHECK(count({"q_proj", "v_proj"}) == 4);
  CHECK(count({"mlp.down_proj"}) == 2);
  CHECK(count({"model.layers.1.*"}) == 7);
  CHECK(count({"model.layers.?.self_attn.[qk]_proj"}) == 4);
  CHECK_THROWS_HOLDING(InvalidArgument, "no layer matches 'c_attn'; there are down_proj, gate_proj",
                       count({"q_proj", "c_attn"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "no layer matches 'lm_head'", count({"lm_head"}));
}
