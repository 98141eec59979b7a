// Fine-tuning: LoRA adapters, frozen weights and learning rates by pattern.

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "io/hf/model_source.h"
#include "tests/e2e/small_run.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

std::string bytes_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A trained model to start from, as a run and as a Hugging Face directory.
struct Base : Fixture {
  std::string run = dir.file("base"), model = dir.file("model");
  Base() {
    run_to(0, joined(small_run(text, run, 1, 20), {"--checkpoint.every=20"}));
    run_to(0, {"consolidate", run, model});
  }
  Arguments tuning(const std::string& out, int world, int steps, const Arguments& more) const {
    Arguments words = {"train", "--json"};
    if (world > 1) words = {"train", "--json", "--nproc", std::to_string(world)};
    return joined(
        joined(words, {"--run.out=" + out, "--data.train=" + text, "--data.tokenizer=bytes",
                       "--model.seq_len=32", "--train.global_batch=12",
                       "--train.steps=" + std::to_string(steps), "--optim.warmup_steps=2",
                       "--optim.schedule=constant", "--optim.lr=0.01", "--checkpoint.every=5"}),
        more);
  }
  Arguments lora(const std::string& out, int world, int steps, const Arguments& more = {}) const {
    return tuning(
        out, world, steps,
        joined({"--model.init_from=" + model, "--lora.rank=4", "--lora.dropout=0.1"}, more));
  }
  std::string answer(const Arguments& words) const {
    return run_to(0, joined({"generate"}, joined(words, {"--prompt=the ", "--temperature=0",
                                                         "--max-new-tokens=20"})))
        .out;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Base, "adapters train sharded, resume at other sizes, and are merged") {
  const std::string one = dir.file("one"), run = dir.file("run");
  std::ofstream(fs::path(model) / "generation_config.json") << R"({"temperature": 0.5})";
  const auto whole = nlohmann::json::parse(run_to(0, lora(one, 1, 20)).out);
  CHECK(whole["memory_peak_bytes"] == whole["memory_planned_bytes"]);
  run_to(0, lora(run, 2, 10, {"--shard.mode=full"}));
  const auto resumed =
      nlohmann::json::parse(run_to(0, lora(run, 3, 20, {"--shard.mode=gradients"})).out);
  CHECK(resumed["memory_peak_bytes"] == resumed["memory_planned_bytes"]);
  const Metrics expected = read_metrics(one), found = read_metrics(run);
  REQUIRE(found.steps.size() == 20);
  for (std::size_t i = 0; i < 20; ++i)
    CHECK(relative(found.steps[i].loss, expected.steps[i].loss) < 1e-4);
  CHECK(std::stod(expected.steps.back().loss) < std::stod(expected.steps.front().loss));

  // Checkpoints hold the adapters alone.
  const auto content = inspect(run);
  for (const auto& [name, tensor] : content.at("tensors").items()) CHECK(holds(name, ".lora_"));
  CHECK(content.at("tensors").size() == 2 * 4 * 2);  // blocks, layers, A and B

  const std::string adapters = dir.file("adapters"), merged = dir.file("merged");
  run_to(0, {"consolidate", run, adapters});
  run_to(0, {"consolidate", run, merged, "--merge-lora"});
  run_to(0, {"consolidate", adapters, dir.file("again"), "--merge-lora"});
  CHECK(bytes_of(fs::path(merged) / "model.safetensors") ==
        bytes_of(dir.path() / "again/model.safetensors"));
  CHECK(bytes_of(fs::path(merged) / "model.safetensors") !=
        bytes_of(fs::path(model) / "model.safetensors"));
  CHECK(bytes_of(fs::path(merged) / "generation_config.json") == R"({"temperature": 0.5})");
  CHECK(!fs::exists(fs::path(adapters) / "generation_config.json"));
  run_to(0, {"checkpoint", "verify", run});
  CHECK(answer({run}) == answer({merged}));

  // On from adapters of PEFT's format, with their settings.
  const std::string on = dir.file("on");
  run_to(0, tuning(on, 2, 2,
                   {"--model.init_from=" + model, "--lora.init_from=" + adapters, "--optim.lr=0"}));
  run_to(0, {"consolidate", on, dir.file("on-merged"), "--merge-lora"});
  CHECK(bytes_of(fs::path(merged) / "model.safetensors") ==
        bytes_of(dir.path() / "on-merged/model.safetensors"));

  // The base has moved.
  const std::string moved = dir.file("moved");
  fs::rename(model, moved);
  CHECK(holds(run_to(2, {"generate", run, "--prompt=a"}).err, "name its directory with --base"));
  CHECK(answer({run, "--base", moved}) == answer({merged}));
  const std::string other = dir.file("other");
  run_to(0, joined(small_run(text, other, 1, 1), {"--model.n_embd=16", "--checkpoint.every=1"}));
  CHECK(holds(run_to(2, {"generate", run, "--prompt=a", "--base", other}).err,
              "don't fit the model"));
  CHECK(holds(run_to(2, lora(run, 1, 25)).err, "name its directory with --model.init_from"));
  model = moved;
  run_to(0, lora(run, 1, 21));
}

TEST_CASE_FIXTURE(Base, "frozen weights stay, and rates follow patterns") {
  const std::string run_dir = dir.file("frozen");
  run_to(0, tuning(run_dir, 2, 6,
                   {"--model.init_from=" + run, "--optim.freeze", "h.0.*", "wte.weight",
                    "--optim.lr_scale", "h.1.attn.*=0", "h.1.attn.c_proj.*=0.5",
                    "--optim.weight_decay=0"}));
  const auto diff = json_of({"checkpoint", "diff", run, run_dir, "--all"}, 1);
  std::set<std::string> changed;
  for (const auto& difference : diff.at("differences"))
    changed.insert(difference.at("tensor").get<std::string>().substr(6));
  CHECK(changed ==
        std::set<std::string>{"h.1.attn.c_proj.bias", "h.1.attn.c_proj.weight", "h.1.ln_1.bias",
                              "h.1.ln_1.weight", "h.1.ln_2.bias", "h.1.ln_2.weight",
                              "h.1.mlp.c_fc.bias", "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.bias",
                              "h.1.mlp.c_proj.weight", "ln_f.bias", "ln_f.weight", "wpe.weight"});
  const std::vector<std::string> same = {"--optim.freeze", "h.0.*", "wte.weight",
                                         "--optim.weight_decay=0"};
  run_to(0, tuning(run_dir, 3, 8, same));
  CHECK(holds(run_to(2, tuning(run_dir, 1, 9, {"--optim.freeze=h.0.*"})).err,
              "optim.freeze is [h.0.*], and was [h.0.*, wte.weight]"));
  auto other = same;
  other.emplace_back("--optim.name=muon");
  CHECK(holds(run_to(2, tuning(run_dir, 1, 9, other)).err, "optim.name is muon, and was adamw"));
}

TEST_CASE_FIXTURE(Base, "a model gets another vocabulary and more positions, with a warning") {
  const auto values = [](const std::string& path, const std::string& name) {
    const auto source = io::open_model(path);
    const Shape shape = source->record(name)->shape;
    std::vector<float> result(static_cast<std::size_t>(numel(shape)));
    source->read(name, 0, numel(shape), result.data(), DType::F32);
    return result;
  };
  const std::string grown = dir.file("grown");
  const auto result = run_to(0, tuning(grown, 3, 1,
                                       {"--model.init_from=" + run, "--model.vocab_size=300",
                                        "--model.seq_len=40", "--optim.lr=0"}));
  CHECK(holds(result.err, "warning: the rows of wpe.weight, wte.weight were resized"));
  for (const std::string name : {"wte.weight", "wpe.weight"}) {
    const std::vector<float> before = values(run, name), after = values(grown, name);
    CHECK(after.size() == (name == "wte.weight" ? 300 * 32 : 40 * 32));
    CHECK(std::equal(before.begin(), before.end(), after.begin()));
    for (std::size_t column = 0; column < 32; ++column) {
      double sum = 0;
      for (std::size_t i = column; i < before.size(); i += 32)
        sum += static_cast<double>(before[i]);
      const double mean = sum * 32 / static_cast<double>(before.size());
      for (std::size_t i = before.size() + column; i < after.size(); i += 32)
        CHECK(static_cast<double>(after[i]) == doctest::Approx(mean));
    }
  }
  // A run keeps the settings of generation of the model that it started from.
  std::ofstream(fs::path(model) / "generation_config.json") << R"({"temperature": 0.5})";
  const std::string kept = dir.file("kept"), exported = dir.file("exported");
  run_to(0, tuning(kept, 1, 1, {"--model.init_from=" + model}));
  run_to(0, {"consolidate", kept, exported});
  CHECK(bytes_of(fs::path(exported) / "generation_config.json") == R"({"temperature": 0.5})");

  // And back.
  const std::string shrunk = dir.file("shrunk");
  run_to(0, tuning(shrunk, 2, 1,
                   {"--model.init_from=" + grown, "--model.vocab_size=256", "--optim.lr=0"}));
  CHECK(values(shrunk, "wte.weight") == values(run, "wte.weight"));
}

TEST_CASE_FIXTURE(Base, "settings of fine-tuning that can't be met are refused") {
  const auto refuses = [&](const Arguments& more, const std::string& text) {
    CAPTURE(text);
    CHECK(holds(run_to(2, tuning(dir.file("refused"), 1, 2, more)).err, text));
  };
  const std::string from = "--model.init_from=" + model;
  refuses({"--lora.rank=4"}, "there is no model to adapt; name one with --model.init_from");
  refuses({from, "--lora.rank=4", "--lora.targets=q_proj"},
          "no layer matches 'q_proj'; there are c_attn, c_fc, c_proj");
  refuses({from, "--lora.rank=4", "--model.vocab_size=300"}, "LoRA keeps the sizes");
  refuses({from, "--lora.rank=4", "--model.seq_len=64"}, "LoRA keeps the sizes");
  refuses({from, "--lora.rank=4", "--optim.freeze=h.0.*"}, "optim.freeze is not for LoRA");
  refuses({from, "--lora.rank=4", "--checkpoint.load_tensors=h.0.*"}, "LoRA needs all");
  refuses({from, "--lora.targets=c_attn"}, "lora.rank is 0");
  refuses({from, "--optim.freeze=h.9.*"}, "h.9.*");
  refuses({from, "--optim.freeze=*"}, "optim.freeze leaves no weight to train");
  refuses({from, "--optim.lr_scale=h.0.*"}, "optim.lr_scale must be PATTERN=FACTOR");
  refuses({"--model.init_from=" + run, "--lora.init_from=" + run}, "holds no LoRA adapters");
  const std::string adapted = dir.file("adapted");
  run_to(0, tuning(adapted, 1, 1, {"--model.init_from=" + run, "--lora.rank=4"}));
  refuses({"--model.init_from=" + adapted, "--lora.rank=2"}, "has LoRA adapters already");
  // The run that was adapted has trained on: its checkpoint is gone, and another one is no base.
  fs::remove_all(fs::path(run) / "checkpoints");
  run_to(0, joined(small_run(text, run, 1, 25), {"--checkpoint.every=25"}));
  CHECK(holds(run_to(2, tuning(adapted, 1, 2, {"--model.init_from=" + run})).err,
              "belong to a checkpoint with other weights"));
  CHECK(holds(run_to(2, {"generate", adapted, "--prompt=a", "--base", run}).err,
              "belong to a checkpoint with other weights"));
  CHECK(holds(run_to(2, {"consolidate", run, dir.file("out"), "--merge-lora"}).err,
              "holds no LoRA adapters; omit --merge-lora"));
}
