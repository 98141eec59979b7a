// The program on shards saved by PyTorch.

#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/cli.h"
#include "tests/support/paths.h"

using namespace tessera;
using test::run_cli;

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

std::string fixture(const std::string& name) {
  return test::source_path("tests/io/dcp/fixtures/" + name);
}

TEST_CASE("a plan shows how names are mapped, and writes nothing") {
  const test::TempDir dir;
  const std::string out = dir.file("out");
  const auto plan = run_cli({"consolidate", fixture("fsdp-wrapped"), out, "--format", "safetensors",
                             "--dtype", "bf16", "--dry-run", "--json"});
  INFO(plan.describe());
  REQUIRE(plan.code == 0);
  const Json json = Json::parse(plan.out);
  CHECK(json["kind"] == "PyTorch DCP");
  CHECK(json["bytes"] == 76);
  CHECK(json["files"].size() == 1);
  CHECK(json["skipped"].size() == 14);
  REQUIRE(json["tensors"].size() == 4);
  for (const Json& tensor : json["tensors"]) {
    if (tensor["name"] != "layers.0.weight") continue;
    CHECK(tensor == Json{{"source", "model._orig_mod.layers.0._checkpoint_wrapped_module.weight"},
                         {"name", "layers.0.weight"},
                         {"dtype", "F32"},
                         {"written", "BF16"},
                         {"shape", {5, 3}},
                         {"bytes", 30},
                         {"file", "model.safetensors"}});
  }
  CHECK_FALSE(fs::exists(out));

  const auto text = run_cli({"consolidate", "--strip", "none", fixture("lightning"), out,
                             "--format", "safetensors", "--dry-run"});
  REQUIRE(text.code == 0);
  CHECK(text.out.find("Lightning FSDP (PyTorch DCP)") != std::string::npos);
  CHECK(text.out.find("model.model.layers.0.weight") != std::string::npos);
  CHECK(text.out.find("12 (optimizer state, written with --what all)") != std::string::npos);
  const auto stripped = run_cli({"consolidate", "--strip", "model.", fixture("lightning"), out,
                                 "--format", "safetensors", "--dry-run"});
  CHECK(stripped.out.find(" model.layers.0.weight ") != std::string::npos);

  const auto chosen =
      run_cli({"consolidate", fixture("lightning"), out, "--format", "safetensors", "--tensors",
               "layers.0.*", "--tensors", "layers.1.bias", "--dry-run"});
  INFO(chosen.describe());
  REQUIRE(chosen.code == 0);
  CHECK(chosen.out.find(" layers.0.weight ") != std::string::npos);
  CHECK(chosen.out.find(" layers.1.weight ") == std::string::npos);
  CHECK(chosen.out.find("1 (not selected by --tensors)") != std::string::npos);
  const auto none = run_cli({"consolidate", fixture("lightning"), out, "--format", "safetensors",
                             "--tensors", "model.*", "--dry-run"});
  CHECK(none.code == 2);
  CHECK(none.err.find("--tensors: model.* matches no tensor of") != std::string::npos);
}

TEST_CASE("exported shards generate the same text as the shards") {
  const test::TempDir dir;
  const std::string out = dir.file("out");
  const auto made = run_cli({"consolidate", fixture("fsdp-gpt2"), out, "--json"});
  INFO(made.describe());
  REQUIRE(made.code == 0);
  CHECK(Json::parse(made.out)["kind"] == "PyTorch DCP");
  std::string first;
  for (const std::string& model : {fixture("fsdp-gpt2"), out}) {
    const auto generated = run_cli({"generate", model, "--prompt-tokens", "1", "2",
                                    "--max-new-tokens", "3", "--temperature", "0"});
    INFO(generated.describe());
    REQUIRE(generated.code == 0);
    if (first.empty()) first = generated.out;
    CHECK(generated.out == first);
    CHECK(generated.out.starts_with("1 2 "));
  }
}

TEST_CASE("with another model's config.json, shards become a Hugging Face directory") {
  const test::TempDir dir;
  const std::string config = dir.file("config.json"), out = dir.file("out");
  std::ofstream(config) << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})";
  const auto plan =
      run_cli({"consolidate", fixture("lightning"), out, "--config", config, "--dry-run"});
  INFO(plan.describe());
  REQUIRE(plan.code == 0);
  CHECK(plan.out.find(" model.layers.0.weight ") != std::string::npos);
  CHECK(plan.out.find("has model_type \"llama\", which tessera does not know") !=
        std::string::npos);
  CHECK_FALSE(fs::exists(out));
  const auto made =
      run_cli({"consolidate", fixture("lightning"), out, "--config", config, "--dtype", "bf16"});
  INFO(made.describe());
  REQUIRE(made.code == 0);
  CHECK(made.err.find("tessera: warning: " + config + " has model_type") != std::string::npos);
  const Json written = Json::parse(std::ifstream(out + "/config.json"));
  CHECK(written["torch_dtype"] == "bfloat16");
  CHECK(written["model_type"] == "llama");
}

TEST_CASE("missing inputs are reported in one sentence") {
  const test::TempDir dir;
  const auto refused = run_cli({"consolidate", fixture("lightning"), dir.file("out")});
  CHECK(refused.code == 2);
  CHECK(refused.err.find("give a config.json with --config, or write its tensors unchanged "
                         "with --format safetensors") != std::string::npos);
  const auto other = run_cli({"consolidate", fixture("lightning"), dir.file("out"), "--config",
                              fixture("fsdp-gpt2/config.json")});
  CHECK(other.code == 2);
  CHECK(other.err.find("missing: wte.weight [17, 4]") != std::string::npos);
  const auto parent = run_cli({"checkpoint", "inspect", fixture("")});
  CHECK(parent.code == 2);
  CHECK(parent.err.find("give one of them") != std::string::npos);
}

TEST_CASE("a dry run ends like the export") {
  const test::TempDir dir;
  const std::string out = dir.file("out");
  fs::create_directory(out);
  for (const bool dry : {true, false}) {
    test::Arguments arguments = {"consolidate", fixture("strided"), out, "--format", "safetensors"};
    if (dry) arguments.push_back("--dry-run");
    const auto refused = run_cli(arguments);
    CHECK(refused.code == 2);
    CHECK(refused.err.find(out + " exists already") != std::string::npos);
    CHECK(refused.out.empty());
    arguments[2] = dir.file("other");
    const auto made = run_cli(arguments);
    INFO(made.describe());
    CHECK(made.code == 0);
  }
}

TEST_CASE("optimizer state is exported as safetensors by default") {
  const test::TempDir dir;
  for (const char* what : {"optimizer", "all"}) {
    const std::string out = dir.file(what);
    const auto made = run_cli({"consolidate", fixture("lightning"), out, "--what", what});
    INFO(made.describe());
    REQUIRE(made.code == 0);
    CHECK(fs::exists(out + "/optimizer.safetensors"));
    CHECK(fs::exists(out + "/tessera.json"));
    const auto refused = run_cli(
        {"consolidate", fixture("lightning"), out + "-hf", "--what", what, "--format", "hf"});
    CHECK(refused.code == 2);
    CHECK(refused.err.find("holds no optimizer state; choose --format safetensors") !=
          std::string::npos);
  }
}

TEST_CASE("an unknown number of shards is a warning, unless --shards states it") {
  const test::TempDir dir;
  const std::string source = fixture("dcp-safetensors");
  const auto command = [&](const char* out, const char* shards) {
    test::Arguments arguments = {"consolidate", source,        dir.file(out),
                                 "--format",    "safetensors", "--json"};
    if (*shards != '\0') arguments.insert(arguments.end(), {"--shards", shards});
    return arguments;
  };
  const auto made = run_cli(command("out", ""));
  INFO(made.describe());
  REQUIRE(made.code == 0);
  CHECK(made.err.starts_with("tessera: warning: 4 shards; their number is not recorded"));
  CHECK(Json::parse(made.out)["warnings"].size() == 1);
  auto dry = command("out2", "");
  dry.push_back("--dry-run");
  CHECK(Json::parse(run_cli(dry).out)["warnings"].size() == 1);
  const auto said = run_cli(command("out2", "4"));
  REQUIRE(said.code == 0);
  CHECK(said.err.empty());
  CHECK(Json::parse(said.out)["warnings"].empty());
  const auto missing = run_cli(command("out3", "5"));
  CHECK(missing.code == 3);
  CHECK(missing.err.find("shard-00005-model-00001-of-00001.safetensors is missing") !=
        std::string::npos);
  CHECK_FALSE(fs::exists(dir.file("out3")));
}

TEST_CASE("inspect lists the contents of shards") {
  const auto text = run_cli({"checkpoint", "inspect", fixture("torchtitan")});
  INFO(text.describe());
  REQUIRE(text.code == 0);
  CHECK(text.out.find("layers.1.weight") != std::string::npos);
  const auto json = run_cli({"checkpoint", "inspect", fixture("dcp-safetensors"), "--json"});
  REQUIRE(json.code == 0);
  CHECK(Json::parse(json.out)["kind"] == "PyTorch DCP as safetensors");
}

TEST_CASE("file names need not be UTF-8") {
  const test::TempDir dir;
  const std::string out = dir.file("out\xff");
  for (const bool dry : {true, false}) {
    test::Arguments arguments = {"consolidate", fixture("fsdp-gpt2"), out, "--json"};
    if (dry) arguments.push_back("--dry-run");
    const auto made = run_cli(arguments);
    INFO(made.describe());
    REQUIRE(made.code == 0);
    CHECK(Json::parse(made.out)["kind"] == "PyTorch DCP");
  }
  const auto plan = run_cli({"checkpoint", "inspect", out, "--json"});
  INFO(plan.describe());
  REQUIRE(plan.code == 0);
  CHECK(Json::parse(plan.out)["source"].get<std::string>().ends_with("out\xEF\xBF\xBD"));
}

}  // namespace
