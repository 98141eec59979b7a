#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/small_run.h"

using namespace tessera;
using test::Arguments;
using test::joined;
using test::run_cli;
using test::small_run;

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

struct Fixture {
  test::TempDir dir;
  std::string text = dir.write("text.txt", test::make_text(3000));

  test::CliResult run(const Arguments& arguments, int code = 0) const {
    auto result = run_cli(arguments);
    INFO(result.describe());
    REQUIRE(result.code == code);
    return result;
  }
  Json json(const Arguments& arguments, int code = 0) const {
    return Json::parse(run(joined(arguments, {"--json"}), code).out);
  }
};

Json read_json(const fs::path& path) {
  std::ifstream in(path);
  return Json::parse(in);
}

// Element ranges of each tensor by shard.
Json layout(const fs::path& checkpoint) {
  Json result;
  const Json sections = read_json(checkpoint / "index.json").at("sections");
  const auto add = [&](const std::string& section, const Json& tensors) {
    for (const auto& [name, tensor] : tensors.items()) {
      for (const Json& chunk : tensor.at("chunks")) {
        result[section + name].push_back({chunk.at("file"), chunk.at("elements")});
      }
    }
  };
  add("", sections.at("model").at("tensors"));
  for (const auto& [moment, tensors] : sections.at("optimizer").at("tensors").items()) {
    add(moment + "/", tensors);
  }
  return result;
}

void flip_byte(const fs::path& path, std::int64_t at) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 1));
  REQUIRE(file.flush());
}

}  // namespace

TEST_CASE_FIXTURE(
    Fixture, "a resharded checkpoint has the layout of that world size, and resumes identically") {
  const std::string four = dir.file("four"), two = dir.file("two");
  run(small_run(text, four, 4, 10));
  run(small_run(text, two, 2, 10));
  const std::string out = dir.file("out");
  const Json said = json({"checkpoint", "reshard", four, out, "--world", "2", "--memory=128KiB"});
  CHECK(said.at("digest") == json({"checkpoint", "inspect", four}).at("digest"));
  CHECK(said.at("digest") == json({"checkpoint", "inspect", out}).at("digest"));
  CHECK(said.at("path") == out + "/step-00000010");
  run({"checkpoint", "verify", out});
  CHECK(layout(out + "/step-00000010") == layout(two + "/checkpoints/step-00000010"));

  const Json same = json({"checkpoint", "diff", four, out, "--what=all"});
  CHECK(same.at("equal") == true);
  CHECK(same.at("bytes_read") == 0);

  const std::string a = dir.file("a"), b = dir.file("b");
  for (const std::string& copy : {a, b}) fs::copy(four, copy, fs::copy_options::recursive);
  fs::remove_all(b + "/checkpoints/step-00000010");
  fs::copy(out + "/step-00000010", b + "/checkpoints/step-00000010");
  run(small_run(text, a, 2, 16));
  run(small_run(text, b, 2, 16));
  CHECK(test::read_metrics(a).steps.size() == 16);
  CHECK((test::read_metrics(a).steps == test::read_metrics(b).steps));
  CHECK(json({"checkpoint", "diff", a, b, "--what=all"}).at("equal") == true);

  const auto refused = run({"checkpoint", "reshard", four, four, "--world=3"}, 2);
  CHECK(refused.err.find("--overwrite") != std::string::npos);
  const int lock = ::open((four + "/.lock").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(::flock(lock, LOCK_EX | LOCK_NB) == 0);
  const Arguments in_place = {"checkpoint", "reshard", four, four, "--world=3", "--overwrite"};
  CHECK(run(in_place, 2).err.find("is in use by a run") != std::string::npos);
  ::close(lock);
  run(in_place);
  CHECK(json({"checkpoint", "inspect", four}).at("world_size") == 3);
  CHECK(json({"checkpoint", "diff", four, out, "--what=all"}).at("equal") == true);
}

TEST_CASE_FIXTURE(Fixture, "checkpoints are listed, inspected, verified and compared") {
  const std::string path = dir.file("run");
  run(joined(small_run(text, path, 2, 20), {"--checkpoint.every=10"}));
  const fs::path checkpoints = fs::path(path) / "checkpoints";
  const fs::path first = checkpoints / "step-00000010", last = checkpoints / "step-00000020";
  fs::create_directory(checkpoints / "step-00000030.r1.tmp");

  SUBCASE("a path and a step that contradict each other") {
    const auto wrong = run({"checkpoint", "verify", last.string(), "--step", "10"}, 2);
    CHECK(wrong.err.find("is the checkpoint of step 20, not of 10") != std::string::npos);
    run({"checkpoint", "verify", last.string(), "--step", "20"});
  }
  SUBCASE("a directory whose name is not UTF-8") {
    const fs::path odd = dir.path() / "odd\xff";
    fs::create_directory(odd);
    fs::rename(last, odd / "step-00000020");
    CHECK(json({"checkpoint", "inspect", odd.string()}).at("step") == 20);
    CHECK(json({"checkpoint", "diff", odd.string(), odd.string()}).at("equal") == true);
    const std::string out = dir.file("out\xff");
    CHECK(json({"checkpoint", "reshard", odd.string(), out, "--world", "1"}).at("step") == 20);
  }
  SUBCASE("list") {
    const Json rows = json({"checkpoint", "list", path});
    REQUIRE(rows.size() == 3);
    CHECK(rows[0].at("step") == 10);
    CHECK(rows[0].at("state") == "committed");
    CHECK(rows[0].at("sections") == Json({"model", "optimizer", "trainer"}));
    CHECK(rows[0].at("age_s") < 600);
    CHECK(rows[0].at("bytes") > 100'000);
    CHECK(rows[2].at("state") == "attempt");
    fs::remove(last / "trainer.json");
    const std::string said = run({"checkpoint", "list", path}).out;
    CHECK(said.find("20  broken") != std::string::npos);
    CHECK(said.find("trainer.json is missing, but the index lists it") != std::string::npos);
    CHECK(said.find("30  attempt") != std::string::npos);
  }
  SUBCASE("inspect") {
    const Json json_of_first = json({"checkpoint", "inspect", path, "--step", "10"});
    CHECK(json_of_first.at("step") == 10);
    CHECK(json_of_first.at("world_size") == 2);
    CHECK(json_of_first.at("format_version") == 1);
    CHECK(json_of_first.at("configuration").at("optim").at("lr") == 0.003);
    CHECK(json_of_first.at("optimizer").at("step") == 10);
    CHECK(json_of_first.at("tensors").at("wte.weight").at("chunks") == 2);
    const std::string said = run({"checkpoint", "inspect", last}).out;
    CHECK(said.find(json({"checkpoint", "inspect", last}).at("digest")) != std::string::npos);
    CHECK(said.find("\"lr\":0.003") != std::string::npos);
  }
  SUBCASE("inspect --chunks") {
    const Json listed = json({"checkpoint", "inspect", last, "--chunks"});
    const Json sections = read_json(last / "index.json").at("sections");
    const Json& moments = sections.at("optimizer").at("tensors");
    const std::string said = run({"checkpoint", "inspect", last, "--chunks"}).out;
    CHECK(said.find("\noptimizer/exp_avg_sq\n") != std::string::npos);
    for (const auto& [where, stored] :
         {std::pair(listed.at("tensors"), sections.at("model").at("tensors")),
          {listed.at("optimizer").at("exp_avg"), moments.at("exp_avg")},
          {listed.at("optimizer").at("exp_avg_sq"), moments.at("exp_avg_sq")}}) {
      REQUIRE(where.size() == stored.size());
      for (const auto& tensor : stored.items()) {
        CAPTURE(tensor.key());
        CHECK(where.at(tensor.key()).at("places") == tensor.value().at("chunks"));
        for (const Json& chunk : tensor.value().at("chunks")) {
          CHECK(said.find(fmt::format(
                    "    {} bytes {} to {}: elements {} to {}, {}\n",
                    chunk.at("file").get<std::string>(), chunk.at("bytes")[0].get<int>(),
                    chunk.at("bytes")[1].get<int>(), chunk.at("elements")[0].get<int>(),
                    chunk.at("elements")[1].get<int>(), chunk.at("checksum").get<std::string>())) !=
                std::string::npos);
        }
      }
    }
  }
  SUBCASE("verify") {
    const Json chunk = read_json(last / "index.json")
                           .at("sections")
                           .at("optimizer")
                           .at("tensors")
                           .at("exp_avg")
                           .at("wpe.weight")
                           .at("chunks")[0];
    flip_byte(last / chunk.at("file"), chunk.at("bytes")[0].get<std::int64_t>() + 5);
    fs::remove(last / "trainer.json");
    for (const char* jobs : {"1", "3"}) {
      const std::string said = run({"checkpoint", "verify", path, "--jobs", jobs}, 1).out;
      CHECK(said.find("trainer.json: ") != std::string::npos);
      CHECK(said.find(
                fmt::format("{}: tensor optimizer/exp_avg/wpe.weight, elements {} to {} "
                            "(bytes {} to {}): the checksum is wrong",
                            chunk.at("file").get<std::string>(), chunk.at("elements")[0].get<int>(),
                            chunk.at("elements")[1].get<int>(), chunk.at("bytes")[0].get<int>(),
                            chunk.at("bytes")[1].get<int>())) != std::string::npos);
      const Json report = json({"checkpoint", "verify", path, "--jobs", jobs}, 1);
      CHECK(report.at("valid") == false);
      CHECK(report.at("problems").size() == 2);
    }
    run({"checkpoint", "verify", first});
    // The shard's JSON is no longer UTF-8, but the report is.
    const fs::path shard = first / "rank-00001-of-00002.safetensors";
    const std::string header = dir.read(fs::relative(shard, dir.path()).string());
    const auto name = static_cast<std::int64_t>(header.find("model/"));
    std::fstream file(shard, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(name + 2);
    file.put('\xff');
    file.close();
    const std::string said = run({"checkpoint", "verify", first}, 1).out;
    CHECK(said.find("rank-00001-of-00002.safetensors: ") != std::string::npos);
    CHECK(said.find("\\xff") != std::string::npos);
    CHECK_NOTHROW(static_cast<void>(Json(said).dump()));
    const std::string text_of_index = dir.read("run/checkpoints/step-00000010/index.json");
    const auto at = static_cast<std::int64_t>(text_of_index.find("\"layer_norm_eps\": 1e-05"));
    flip_byte(first / "index.json", at + 22);
    CHECK(run({"checkpoint", "verify", first}, 1).out.find("its own checksum is wrong") !=
          std::string::npos);

    Json index = read_json(last / "index.json");
    index.erase("checksum");
    auto& chunks = index["sections"]["model"]["tensors"]["wpe.weight"]["chunks"];
    const std::int64_t begin = chunks[0]["elements"][0], end = chunks[0]["elements"][1];
    chunks.erase(0);
    dir.write("run/checkpoints/step-00000020/index.json", index.dump());
    const Json problem = json({"checkpoint", "verify", last}, 1).at("problems").at(0);
    CHECK(problem.at("file") == "index.json");
    CHECK(problem.at("tensor") == "model/wpe.weight");
    CHECK(problem.at("elements") == Json({begin, end}));
    CHECK(run({"checkpoint", "verify", last}, 1)
              .out.find(fmt::format("elements {} to {} are in no chunk", begin, end)) !=
          std::string::npos);
  }
  SUBCASE("diff") {
    const Json report = json({"checkpoint", "diff", first, last}, 1);
    CHECK(report.at("equal") == false);
    CHECK(report.at("compared") == report.at("differences").size());
    const Json& difference = report.at("differences")[0];
    CHECK(difference.at("kind") == "values");
    CHECK(difference.at("differing") > 0);
    CHECK(difference.at("max_absolute") > 0);
    const std::string said = run({"checkpoint", "diff", first, last}, 1).out;
    CHECK(said.find("model/wte.weight: ") != std::string::npos);
    CHECK(said.find(" differ, by up to ") != std::string::npos);
    run({"checkpoint", "diff", first, last, "--tolerance=10"});
    run({"checkpoint", "diff", last, path, "--what=all"});
    run({"checkpoint", "diff", first, last, "--tolerance=-1"}, 2);
    run({"checkpoint", "diff", first, dir.file("nothing")}, 3);
  }
  SUBCASE("a newer format is refused by its number") {
    Json index = read_json(last / "index.json");
    index.erase("checksum");
    index["version"] = 7;
    dir.write("run/checkpoints/step-00000020/index.json", index.dump());
    const std::string problem = "has format version 7; this build reads up to 1";
    CHECK(run({"checkpoint", "inspect", last}, 3).err.find(problem) != std::string::npos);
    CHECK(run({"checkpoint", "verify", last}, 1).out.find(problem) != std::string::npos);
    CHECK(run({"checkpoint", "diff", first, last}, 3).err.find(problem) != std::string::npos);
    CHECK(run({"checkpoint", "reshard", last, dir.file("o"), "--world=1"}, 3).err.find(problem) !=
          std::string::npos);
    const std::string list = run({"checkpoint", "list", path}).out;
    CHECK(list.find(problem) != std::string::npos);
    CHECK(list.find("        20  newer format  ") != std::string::npos);
    int newer = 0;
    for (const Json& entry : json({"checkpoint", "list", path})) {
      newer += entry.at("state") == "newer format" ? 1 : 0;
      CHECK(entry.at("state") != "broken");
    }
    CHECK(newer == 1);
  }
}
