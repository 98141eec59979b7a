// The program on shards saved by PyTorch.

#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/support/cli.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

std::string fixture(const std::string& name) {
  return source_path("tests/io/dcp/fixtures/" + name);
}

TEST_CASE("shards of other programs are verified by the checksums that they have") {
  const TempDir dir;
  const std::string ranks = source_path("tests/io/torch/fixtures/fsdp2");
  CHECK(holds(run_to(0, {"checkpoint", "verify", ranks}).out, "220 B read, complete"));
  // Each byte of a tensor counts.
  fs::copy(ranks, dir.file("ranks"), fs::copy_options::recursive);
  const std::string file = dir.file("ranks/model_world_size_3_rank_1.pt");
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  const float row[] = {2.25F, 2.5F, 2.75F};  // of up.weight
  const std::size_t at = bytes.find(std::string(reinterpret_cast<const char*>(row), sizeof(row)));
  REQUIRE(at != std::string::npos);
  stream.clear();
  stream.seekp(static_cast<std::streamoff>(at) + 5);
  stream.put(static_cast<char>(bytes[at + 5] ^ 1));
  stream.close();
  const auto damaged = run_to(1, {"checkpoint", "verify", dir.file("ranks")});
  CHECK(holds(damaged.out, "model_world_size_3_rank_1.pt: tensor up.weight"));
  const Json json =
      json_of({"checkpoint", "verify", "--json", source_path("tests/io/dcp/fixtures/lightning")});
  CHECK(json["valid"] == true);
  CHECK(json["unverifiable_bytes"] == 0);
  // safetensors have no checksums.
  const std::string plain = dir.file("plain");
  run_to(0, {"consolidate", ranks, plain, "--format", "safetensors", "--strip", "none"});
  for (const char* name : {"tessera.json", "index.json"}) fs::remove(fs::path(plain) / name);
  CHECK(holds(run_to(0, {"checkpoint", "verify", plain}).out,
              "220 B have no checksum; `tessera checkpoint seal " + plain + "` records them"));
}

void flip(const std::string& file, std::int64_t byte) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(byte, byte < 0 ? std::ios::end : std::ios::beg);
  const auto at = stream.tellg();
  const char old = static_cast<char>(stream.get());
  stream.seekp(at);
  stream.put(static_cast<char>(old ^ 1));
}

TEST_CASE("options of consolidate have the spellings of those of other commands") {
  const TempDir dir;
  const std::string source = fixture("fsdp-gpt2"), out = dir.file("out");
  const auto run_with = [&](int code, std::vector<std::string> options) {
    options.insert(options.begin(), {"consolidate", source, out, "--overwrite=yes"});
    return run_to(code, options);
  };
  CHECK(holds(run_with(2, {"--dry-run=maybe"}).err, "is not true or false"));
  CHECK(holds(run_with(2, {"--jobs", "99999999999"}).err, "is not an integer"));
  CHECK(Json::parse(run_with(0, {"--json", "--json=1", "--dry-run"}).out).contains("files"));
  CHECK_FALSE(fs::exists(out));
  run_with(0, {"--jobs", "+3", "--dry-run=off", "--buffered", "--buffered", "--part", ""});
  CHECK(fs::exists(out + "/model.safetensors"));
  CHECK_FALSE(holds(run_with(0, {"--jobs", "0x4", "--json", "--json=no"}).out, "{"));
  CHECK(holds(run_with(2, {"--overwrite=no"}).err, "exists already"));
}

TEST_CASE("a seal makes damage of files without checksums visible to every command") {
  const TempDir dir;
  const std::string model = dir.file("model"), out = dir.file("out");
  run_to(0, {"consolidate", fixture("fsdp-gpt2"), model});
  const Json sealed = json_of({"checkpoint", "seal", model, "--json"});
  CHECK(sealed["seal"] == model + "/tessera.seal.json");
  CHECK(sealed["files"] == 2);
  CHECK(holds(run_to(0, {"checkpoint", "verify", model}).out, "checksums right, as sealed on "));
  CHECK(json_of({"checkpoint", "verify", "--json", model})["unverifiable_bytes"] == 0);
  CHECK(holds(run_to(2, {"checkpoint", "seal", model}).err, "--overwrite"));
  flip(model + "/model.safetensors", -3);
  const auto damaged = run_to(1, {"checkpoint", "verify", model});
  CHECK(holds(damaged.out, "model.safetensors: bytes 0 to "));
  CHECK(holds(damaged.out, "the checksum is not that of the seal"));
  CHECK(holds(damaged.out, "(tensor "));
  const auto refused = run_to(3, {"consolidate", model, out});
  CHECK(holds(refused.err, "files differ from " + model + "/tessera.seal.json"));
  CHECK_FALSE(fs::exists(out));
  CHECK(holds(run_to(3, {"checkpoint", "diff", model, model}).err, "model.safetensors: bytes 0"));
  CHECK(holds(run_to(3, {"checkpoint", "seal", model, "--overwrite"}).err, "is not replaced"));
  run_to(3, {"checkpoint", "reshard", model, out, "--world", "2"});
  flip(model + "/model.safetensors", -3);
  std::ofstream(model + "/README.md") << "new";
  const auto more = run_to(0, {"checkpoint", "verify", model});
  CHECK(holds(more.out, "note: README.md is not in the seal"));
  run_to(0, {"checkpoint", "seal", model, "--overwrite"});
  CHECK_FALSE(holds(run_to(0, {"checkpoint", "verify", model}).out, "note:"));
  // A directory of any kind.
  fs::create_directory(dir.file("any"));
  std::ofstream(dir.file("any") + "/notes.txt") << "text";
  run_to(0, {"checkpoint", "seal", dir.file("any")});
  CHECK(holds(run_to(0, {"checkpoint", "verify", dir.file("any")}).out, "0 tensors, 4 B read"));
  flip(dir.file("any") + "/notes.txt", 0);
  CHECK(holds(run_to(1, {"checkpoint", "verify", dir.file("any")}).out, "notes.txt: bytes 0 to 4"));
}

TEST_CASE("a training checkpoint is compared with its export") {
  const TempDir dir;
  const std::string model = dir.file("model"), small = dir.file("small");
  run_to(0, {"consolidate", fixture("fsdp-gpt2"), model});
  run_to(0, {"consolidate", fixture("fsdp-gpt2"), small, "--dtype", "bf16"});
  const auto same = run_to(0, {"checkpoint", "diff", fixture("fsdp-gpt2"), model});
  CHECK(holds(same.out, "(PyTorch DCP)"));
  CHECK(holds(same.out, "equal: 16 tensors"));
  const auto rounded = run_to(1, {"checkpoint", "diff", fixture("fsdp-gpt2"), small});
  CHECK(holds(rounded.out, "B is A rounded to bf16; --rounded accepts that"));
  CHECK(holds(run_to(0, {"checkpoint", "diff", fixture("fsdp-gpt2"), small, "--rounded"}).out,
              "16 of them rounded"));
  const Json json = Json::parse(run_to(1, {"checkpoint", "diff", small, model, "--json"}).out);
  CHECK(json["rounding"] == "A is B rounded to bf16");
  CHECK(json["kind_b"] == "Hugging Face model");
  CHECK(json["differences"][0]["rounded"] == true);
  const auto other = run_to(1, {"checkpoint", "diff", fixture("lightning"), model});
  CHECK(holds(other.out, "no tensor has the same name in A and B"));
}

TEST_CASE("other programs' shards are written as those of a run") {
  const TempDir dir;
  struct Case {
    const char *source, *step, *what;
  };
  for (const Case& c : {Case{"dcp/fixtures/fsdp-gpt2", "step-00000000", "model"},
                        Case{"dcp/fixtures/experts", "step-00000001", "model"},
                        Case{"dcp/fixtures/lightning", "step-00000001", "all"},
                        Case{"dcp/fixtures/fsdp-wrapped", "step-00000001", "all"},
                        Case{"dcp/fixtures/mixed", "step-00000000", "model"},
                        Case{"deepspeed/fixtures/zero3-gpt2", "step-00000002", "all"},
                        Case{"megatron/fixtures/llama", "step-00000002", "all"},
                        Case{"megatron/fixtures/qwen3-moe", "step-00000000", "model"},
                        Case{"torch/fixtures/fsdp2", "step-00000000", "model"}}) {
    CAPTURE(c.source);
    const std::string path = source_path("tests/io/" + std::string(c.source));
    const std::string out = dir.file(fs::path(c.source).filename().string());
    const Json report = json_of({"checkpoint", "reshard", path, out, "--world", "3", "--json"});
    CHECK(report["path"] == out + "/" + c.step);
    CHECK(report["world_size"] == 3);
    run_to(0, {"checkpoint", "verify", out});
    // Both in one format, so that moments are compared, too.
    for (const auto& [from, to] : {std::pair(out, out + "-a"), std::pair(path, out + "-b")})
      run_to(0, {"consolidate", from, to, "--format", "dcp", "--what", c.what});
    run_to(0, {"checkpoint", "diff", out + "-a", out + "-b", "--what", c.what});
  }
  const std::string model = dir.file("model");
  run_to(0, {"consolidate", fixture("fsdp-gpt2"), model});
  run_to(0, {"checkpoint", "reshard", model, dir.file("whole"), "--world", "2"});
  CHECK(holds(run_to(0, {"checkpoint", "diff", dir.file("whole"), model}).out, "equal: "));
  run_to(0, {"checkpoint", "reshard", model, dir.file("whole"), "--world", "4", "--overwrite"});
  // A run would resume from it.
  std::ofstream(dir.file("whole") + "/config.json") << "{}";
  CHECK(holds(
      run_to(2, {"checkpoint", "reshard", model, dir.file("whole"), "--world", "2", "--overwrite"})
          .err,
      "is of a run (config.json)"));
  const std::string weights = dir.file("weights");
  const Json alone = json_of({"checkpoint", "reshard", fixture("lightning"), weights, "--world",
                              "2", "--what", "model", "--json"});
  CHECK(alone["skipped"] == 12);
  CHECK(holds(run_to(2, {"consolidate", weights, dir.file("o"), "--what", "optimizer"}).err,
              "optimizer"));
}

TEST_CASE("checkpoints of other programs are listed and inspected") {
  const TempDir dir;
  const std::string run = dir.file("run");
  fs::create_directory(run);
  const auto nothing = run_to(1, {"checkpoint", "list", run});
  CHECK(holds(nothing.out, "contains no checkpoint"));
  CHECK(Json::parse(run_to(1, {"checkpoint", "list", run, "--json"}).out) == Json::array());
  for (const char* step : {"step-10", "step-20"}) fs::copy(fixture("fsdp-gpt2"), run + "/" + step);
  fs::remove(run + "/step-20/__1_0.distcp");
  const auto list = run_to(0, {"checkpoint", "list", run});
  CHECK(holds(list.out, run + "/step-10: PyTorch DCP, newest"));
  CHECK(holds(list.out, "        20  incomplete"));
  const Json rows = json_of({"checkpoint", "list", "--json", run});
  REQUIRE(rows.size() == 2);
  CHECK(rows[0]["newest"] == true);
  CHECK(rows[1]["state"] == "incomplete");
  for (const char* path : {"io/gguf/fixtures/llama.gguf", "io/torch/fixtures/lightning/last.ckpt",
                           "io/torch/fixtures/fsdp2", "io/deepspeed/fixtures/zero2",
                           "io/dcp/fixtures/other-dtypes", "io/gguf/fixtures/llama"}) {
    CAPTURE(path);
    const std::string source = source_path("tests/" + std::string(path));
    CHECK(json_of({"checkpoint", "inspect", "--json", source})["tensors"].size() > 0);
    CHECK(json_of({"checkpoint", "list", "--json", source}).size() == 1);
    CHECK(json_of({"checkpoint", "verify", "--json", source})["valid"] == true);
    CHECK(json_of({"checkpoint", "diff", "--json", source, source})["equal"] == true);
  }
  const std::string gguf = source_path("tests/io/gguf/fixtures/llama.gguf");
  CHECK(holds(run_to(2, {"generate", gguf, "--prompt", "x"}).err, "tessera consolidate " + gguf));
}

TEST_CASE("every error under --json is JSON on standard output") {
  const TempDir dir;
  const std::string absent = dir.file("absent"), file = dir.write("file", "text");
  for (const Arguments& wrong :
       std::vector<Arguments>{{"checkpoint", "list", absent},
                              {"checkpoint", "inspect", absent},
                              {"checkpoint", "verify", absent},
                              {"checkpoint", "verify", file},
                              {"checkpoint", "diff", absent, absent},
                              {"checkpoint", "seal", absent},
                              {"checkpoint", "reshard", absent, absent, "--world", "2"},
                              {"checkpoint", "reshard"},
                              {"checkpoint", "list", absent, "--no-such-option"},
                              {"consolidate", absent, file},
                              {"consolidate"}}) {
    CAPTURE(wrong);
    const auto result = run_cli(joined(wrong, {"--json"}));
    CHECK((result.code == 2 || result.code == 3));
    const Json json = Json::parse(result.out, nullptr, false);
    REQUIRE_FALSE(json.is_discarded());
    CHECK(json["exit_code"] == result.code);
    CHECK(json["error"].get<std::string>().size() > 10);
    CHECK(holds(result.err, "tessera: error: "));
  }
}

TEST_CASE("a plan shows how names are mapped, and writes nothing") {
  const TempDir dir;
  const std::string out = dir.file("out");
  const Json json = json_of({"consolidate", fixture("fsdp-wrapped"), out, "--format", "safetensors",
                             "--dtype", "bf16", "--dry-run"});
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

  const auto text = run_to(0, {"consolidate", "--strip", "none", fixture("lightning"), out,
                               "--format", "safetensors", "--dry-run"});
  CHECK(holds(text.out, "Lightning FSDP (PyTorch DCP)"));
  CHECK(holds(text.out, "model.model.layers.0.weight"));
  CHECK(holds(text.out, "12 (optimizer state, written with --what all)"));
  const auto stripped = run_cli({"consolidate", "--strip", "model.", fixture("lightning"), out,
                                 "--format", "safetensors", "--dry-run"});
  CHECK(holds(stripped.out, " model.layers.0.weight "));

  const auto chosen =
      run_to(0, {"consolidate", fixture("lightning"), out, "--format", "safetensors", "--tensors",
                 "model.layers.0.*", "--tensors", "model.layers.1.bias", "--dry-run"});
  CHECK(holds(chosen.out, " model.layers.0.weight "));
  CHECK_FALSE(holds(chosen.out, " model.layers.1.weight "));
  CHECK(holds(chosen.out, "1 (not selected by --tensors)"));
  const auto none = run_to(2, {"consolidate", fixture("lightning"), out, "--format", "safetensors",
                               "--tensors", "layers.*", "--dry-run"});
  CHECK(holds(none.err, "--tensors: layers.* matches no tensor of"));
}

TEST_CASE("exported shards generate the same text as the shards") {
  const TempDir dir;
  const std::string out = dir.file("out");
  CHECK(json_of({"consolidate", fixture("fsdp-gpt2"), out})["kind"] == "PyTorch DCP");
  std::string first;
  for (const std::string& model : {fixture("fsdp-gpt2"), out}) {
    const auto generated = run_to(0, {"generate", model, "--prompt-tokens", "1", "2",
                                      "--max-new-tokens", "3", "--temperature", "0"});
    if (first.empty()) first = generated.out;
    CHECK(generated.out == first);
    CHECK(generated.out.starts_with("1 2 "));
  }
}

TEST_CASE("with another model's config.json, shards become a Hugging Face directory") {
  const TempDir dir;
  const std::string config = dir.file("config.json"), out = dir.file("out");
  std::ofstream(config) << R"({"architectures": ["ArcticForCausalLM"], "model_type": "arctic"})";
  const auto plan =
      run_to(0, {"consolidate", fixture("lightning"), out, "--config", config, "--dry-run"});
  CHECK(holds(plan.out, " model.layers.0.weight "));
  CHECK(holds(plan.out, "has model_type \"arctic\", which tessera does not know"));
  CHECK_FALSE(fs::exists(out));
  const auto made =
      run_to(0, {"consolidate", fixture("lightning"), out, "--config", config, "--dtype", "bf16"});
  CHECK(holds(made.err, "tessera: warning: " + config + " has model_type"));
  const Json written = Json::parse(std::ifstream(out + "/config.json"));
  CHECK(written["torch_dtype"] == "bfloat16");
  CHECK(written["model_type"] == "arctic");
}

TEST_CASE("missing inputs are reported in one sentence") {
  const TempDir dir;
  const auto refused = run_to(2, {"consolidate", fixture("lightning"), dir.file("out")});
  CHECK(holds(refused.err,
              "give a config.json with --config, or write its tensors unchanged "
              "with --format safetensors"));
  const auto other = run_to(2, {"consolidate", fixture("lightning"), dir.file("out"), "--config",
                                fixture("fsdp-gpt2/config.json")});
  CHECK(holds(other.err, "missing: transformer.wte.weight [17, 4]"));
  const auto parent = run_to(2, {"checkpoint", "inspect", fixture("")});
  CHECK(holds(parent.err, "give one of them"));
}

TEST_CASE("names are changed and chosen by options, and errors are JSON under --json") {
  const TempDir dir;
  const auto plan = [&](const Arguments& more) {
    return run_cli(joined(
        {"consolidate", fixture("fsdp-gpt2"), dir.file("out"), "--dry-run", "--json"}, more));
  };
  CHECK(plan({"--config", fixture("fsdp-gpt2")}).code == 0);  // a directory
  CHECK(plan({"--rename", "s/wte/x/", "--rename", "s/\\.x\\./.wte./"}).code == 0);
  CHECK(plan({"--exclude", "*lm_head*", "--select", "model.*"}).code == 0);
  for (const Arguments& wrong : std::vector<Arguments>{{"--select", "net.*"},
                                                       {"--exclude", "net.*"},
                                                       {"--strip", "net."},
                                                       {"--rename", "s/net/x/"},
                                                       {"--memory", "1KB"},
                                                       {"--like", fixture("mixed")}}) {
    CAPTURE(wrong[0]);
    const auto refused = plan(wrong);
    CHECK(refused.code == 2);
    CHECK(holds(refused.err, Json::parse(refused.out)["error"].get<std::string>()));
  }
  CHECK(holds(plan({"--dtype", "fp16"}).err, "keep,f32,bf16"));
  CHECK(holds(plan({"--memory", "1KB"}).err, "the least that works 128 KiB"));
}

TEST_CASE("a dry run ends like the export") {
  const TempDir dir;
  const std::string out = dir.file("out");
  fs::create_directory(out);
  for (const bool dry : {true, false}) {
    Arguments arguments = {"consolidate", fixture("strided"), out, "--format", "safetensors"};
    if (dry) arguments.push_back("--dry-run");
    const auto refused = run_to(2, arguments);
    CHECK(holds(refused.err, out + " exists already"));
    CHECK(refused.out.empty());
    arguments[2] = dir.file("other");
    run_to(0, arguments);
  }
}

TEST_CASE("optimizer state is exported as safetensors by default") {
  const TempDir dir;
  for (const char* what : {"optimizer", "all"}) {
    const std::string out = dir.file(what);
    run_to(0, {"consolidate", fixture("lightning"), out, "--what", what});
    CHECK(fs::exists(out + "/optimizer.safetensors"));
    CHECK(fs::exists(out + "/tessera.json"));
    const auto refused = run_to(
        2, {"consolidate", fixture("lightning"), out + "-hf", "--what", what, "--format", "hf"});
    CHECK(holds(refused.err,
                "optimizer state is written with --format safetensors, dcp or bin only"));
  }
}

TEST_CASE("an unknown number of shards is a warning, unless --shards states it") {
  const TempDir dir;
  const std::string source = fixture("dcp-safetensors");
  const auto command = [&](const char* out, const char* shards) {
    Arguments arguments = {"consolidate", source,        dir.file(out),
                           "--format",    "safetensors", "--json"};
    if (*shards != '\0') arguments.insert(arguments.end(), {"--shards", shards});
    return arguments;
  };
  const auto made = run_to(0, command("out", ""));
  CHECK(made.err.starts_with("tessera: warning: 4 shards; their number is not recorded"));
  CHECK(Json::parse(made.out)["warnings"].size() == 1);
  const auto dry = joined(command("out2", ""), {"--dry-run"});
  CHECK(Json::parse(run_cli(dry).out)["warnings"].size() == 1);
  const auto said = run_to(0, command("out2", "4"));
  CHECK(said.err.empty());
  CHECK(Json::parse(said.out)["warnings"].empty());
  const auto missing = run_to(3, command("out3", "5"));
  CHECK(holds(missing.err, "shard-00005-model-00001-of-00001.safetensors is missing"));
  CHECK_FALSE(fs::exists(dir.file("out3")));
}

TEST_CASE("inspect lists the contents of shards") {
  const auto text = run_to(0, {"checkpoint", "inspect", fixture("torchtitan")});
  CHECK(holds(text.out, "layers.1.weight"));
  CHECK(inspect(fixture("dcp-safetensors"))["kind"] == "PyTorch DCP as safetensors");
}

TEST_CASE("file names need not be UTF-8") {
  const TempDir dir;
  const std::string out = dir.file("out\xff");
  for (const bool dry : {true, false}) {
    Arguments arguments = {"consolidate", fixture("fsdp-gpt2"), out};
    if (dry) arguments.push_back("--dry-run");
    CHECK(json_of(arguments)["kind"] == "PyTorch DCP");
  }
  CHECK(inspect(out)["source"].get<std::string>().ends_with("out\xEF\xBF\xBD"));
}

}  // namespace
