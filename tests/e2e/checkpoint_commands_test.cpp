#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/small_run.h"
#include "tests/io/support.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

Json read_json(const fs::path& path) { return Json::parse(read_text(path)); }

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

}  // namespace

TEST_CASE_FIXTURE(
    Fixture, "a resharded checkpoint has the layout of that world size, and resumes identically") {
  const std::string four = dir.file("four"), two = dir.file("two");
  run_to(0, small_run(text, four, 4, 10));
  run_to(0, small_run(text, two, 2, 10));
  const std::string out = dir.file("out");
  const Json said =
      json_of({"checkpoint", "reshard", four, out, "--world", "2", "--memory=128KiB"});
  CHECK(said.at("digest") == inspect(four).at("digest"));
  CHECK(said.at("digest") == inspect(out).at("digest"));
  CHECK(said.at("path") == out + "/step-00000010");
  run_to(0, {"checkpoint", "verify", out});
  CHECK(layout(out + "/step-00000010") == layout(two + "/checkpoints/step-00000010"));

  const Json same = json_of({"checkpoint", "diff", four, out, "--what=all"});
  CHECK(same.at("equal") == true);
  CHECK(same.at("bytes_read") == 0);

  const std::string a = dir.file("a"), b = dir.file("b");
  for (const std::string& copy : {a, b}) fs::copy(four, copy, fs::copy_options::recursive);
  fs::remove_all(b + "/checkpoints/step-00000010");
  fs::copy(out + "/step-00000010", b + "/checkpoints/step-00000010");
  run_to(0, small_run(text, a, 2, 16));
  run_to(0, small_run(text, b, 2, 16));
  CHECK(read_metrics(a).steps.size() == 16);
  CHECK((read_metrics(a).steps == read_metrics(b).steps));
  CHECK(json_of({"checkpoint", "diff", a, b, "--what=all", "--strip=auto"}).at("equal") == true);

  const auto refused = run_to(2, {"checkpoint", "reshard", four, four, "--world=3"});
  CHECK(holds(refused.err, "--overwrite"));
  const int lock = ::open((four + "/.lock").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(::flock(lock, LOCK_EX | LOCK_NB) == 0);
  const Arguments in_place = {"checkpoint", "reshard", four, four, "--world=3", "--overwrite"};
  CHECK(holds(run_to(2, in_place).err, "is in use by a run"));
  ::close(lock);
  run_to(0, in_place);
  CHECK(inspect(four).at("world_size") == 3);
  CHECK(json_of({"checkpoint", "diff", four, out, "--what=all"}).at("equal") == true);
}

TEST_CASE_FIXTURE(Fixture, "checkpoints are listed, inspected, verified and compared") {
  const std::string path = dir.file("run");
  run_to(0, joined(small_run(text, path, 2, 20), {"--checkpoint.every=10"}));
  const fs::path checkpoints = fs::path(path) / "checkpoints";
  const fs::path first = checkpoints / "step-00000010", last = checkpoints / "step-00000020";
  fs::create_directory(checkpoints / "step-00000030.r1.tmp");

  SUBCASE("a path and a step that contradict each other") {
    const auto wrong = run_to(2, {"checkpoint", "verify", last.string(), "--step", "10"});
    CHECK(holds(wrong.err, "is the checkpoint of step 20, not of 10"));
    run_to(0, {"checkpoint", "verify", last.string(), "--step", "20"});
  }
  SUBCASE("a directory whose name is not UTF-8") {
    const fs::path odd = dir.path() / "odd\xff";
    fs::create_directory(odd);
    fs::rename(last, odd / "step-00000020");
    CHECK(inspect(odd).at("step") == 20);
    CHECK(json_of({"checkpoint", "diff", odd.string(), odd.string()}).at("equal") == true);
    const std::string out = dir.file("out\xff");
    CHECK(json_of({"checkpoint", "reshard", odd.string(), out, "--world", "1"}).at("step") == 20);
  }
  SUBCASE("list") {
    const Json rows = json_of({"checkpoint", "list", path});
    REQUIRE(rows.size() == 3);
    CHECK(rows[0].at("step") == 10);
    CHECK(rows[0].at("state") == "committed");
    CHECK(rows[0].at("sections") == Json({"model", "optimizer", "trainer"}));
    CHECK(rows[0].at("age_s") < 600);
    CHECK(rows[0].at("bytes") > 100'000);
    CHECK(rows[2].at("state") == "attempt");
    fs::remove(last / "trainer.json");
    const std::string said = run_to(0, {"checkpoint", "list", path}).out;
    CHECK(holds(said, "20  broken"));
    CHECK(holds(said, "trainer.json is missing, but the index lists it"));
    CHECK(holds(said, "30  attempt"));
  }
  SUBCASE("inspect") {
    const Json json_of_first = json_of({"checkpoint", "inspect", path, "--step", "10"});
    CHECK(json_of_first.at("step") == 10);
    CHECK(json_of_first.at("world_size") == 2);
    CHECK(json_of_first.at("format_version") == 1);
    CHECK(json_of_first.at("configuration").at("optim").at("lr") == 0.003);
    CHECK(json_of_first.at("optimizer").at("step") == 10);
    CHECK(json_of_first.at("tensors").at("wte.weight").at("chunks") == 2);
    const std::string said = run_to(0, {"checkpoint", "inspect", last}).out;
    CHECK(holds(said, inspect(last).at("digest").get<std::string>()));
    CHECK(holds(said, "\"lr\":0.003"));
  }
  SUBCASE("inspect --chunks") {
    const Json listed = json_of({"checkpoint", "inspect", last, "--chunks"});
    const Json sections = read_json(last / "index.json").at("sections");
    const Json& moments = sections.at("optimizer").at("tensors");
    const std::string said = run_to(0, {"checkpoint", "inspect", last, "--chunks"}).out;
    CHECK(holds(said, "\noptimizer/exp_avg_sq\n"));
    for (const auto& [where, stored] :
         {std::pair(listed.at("tensors"), sections.at("model").at("tensors")),
          {listed.at("optimizer").at("exp_avg"), moments.at("exp_avg")},
          {listed.at("optimizer").at("exp_avg_sq"), moments.at("exp_avg_sq")}}) {
      REQUIRE(where.size() == stored.size());
      for (const auto& tensor : stored.items()) {
        CAPTURE(tensor.key());
        CHECK(where.at(tensor.key()).at("places") == tensor.value().at("chunks"));
        for (const Json& chunk : tensor.value().at("chunks")) {
          CHECK(holds(
              said,
              fmt::format("    {} bytes {} to {}: elements {} to {}, {}\n",
                          chunk.at("file").get<std::string>(), chunk.at("bytes")[0].get<int>(),
                          chunk.at("bytes")[1].get<int>(), chunk.at("elements")[0].get<int>(),
                          chunk.at("elements")[1].get<int>(),
                          chunk.at("checksum").get<std::string>())));
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
    flip_bit(last / chunk.at("file"), chunk.at("bytes")[0].get<std::int64_t>() + 5);
    fs::remove(last / "trainer.json");
    for (const char* jobs : {"1", "3"}) {
      const std::string said = run_to(1, {"checkpoint", "verify", path, "--jobs", jobs}).out;
      CHECK(holds(said, "trainer.json: "));
      CHECK(holds(
          said, fmt::format("{}: tensor optimizer/exp_avg/wpe.weight, elements {} to {} "
                            "(bytes {} to {}): the checksum is wrong",
                            chunk.at("file").get<std::string>(), chunk.at("elements")[0].get<int>(),
                            chunk.at("elements")[1].get<int>(), chunk.at("bytes")[0].get<int>(),
                            chunk.at("bytes")[1].get<int>())));
      const Json report = json_of({"checkpoint", "verify", path, "--jobs", jobs}, 1);
      CHECK(report.at("valid") == false);
      CHECK(report.at("problems").size() == 2);
    }
    run_to(0, {"checkpoint", "verify", first});
    // The shard's JSON is no longer UTF-8, but the report is.
    const fs::path shard = first / "rank-00001-of-00002.safetensors";
    std::string header = read_text(shard);
    header[header.find("model/") + 2] = '\xff';
    write_text(shard, header);
    const std::string said = run_to(1, {"checkpoint", "verify", first}).out;
    CHECK(holds(said, "rank-00001-of-00002.safetensors: "));
    CHECK(holds(said, "\\xff"));
    CHECK_NOTHROW(static_cast<void>(Json(said).dump()));
    const auto at = read_text(first / "index.json").find("\"layer_norm_eps\": 1e-05");
    flip_bit(first / "index.json", static_cast<std::int64_t>(at) + 22);
    CHECK(holds(run_to(1, {"checkpoint", "verify", first}).out, "its own checksum is wrong"));

    Json index = read_json(last / "index.json");
    index.erase("checksum");
    auto& chunks = index["sections"]["model"]["tensors"]["wpe.weight"]["chunks"];
    const std::int64_t begin = chunks[0]["elements"][0], end = chunks[0]["elements"][1];
    chunks.erase(0);
    dir.write("run/checkpoints/step-00000020/index.json", index.dump());
    const Json problem = json_of({"checkpoint", "verify", last}, 1).at("problems").at(0);
    CHECK(problem.at("file") == "index.json");
    CHECK(problem.at("tensor") == "model/wpe.weight");
    CHECK(problem.at("elements") == Json({begin, end}));
    CHECK(holds(run_to(1, {"checkpoint", "verify", last}).out,
                fmt::format("elements {} to {} are in no chunk", begin, end)));
  }
  SUBCASE("diff") {
    const Json report = json_of({"checkpoint", "diff", first, last}, 1);
    CHECK(report.at("equal") == false);
    CHECK(report.at("compared") == report.at("differences").size());
    const Json& difference = report.at("differences")[0];
    CHECK(difference.at("kind") == "values");
    CHECK(difference.at("differing") > 0);
    CHECK(difference.at("max_absolute") > 0);
    const std::string said = run_to(1, {"checkpoint", "diff", first, last}).out;
    CHECK(holds(said, "model/wte.weight: "));
    CHECK(holds(said, " differ, by up to "));
    run_to(0, {"checkpoint", "diff", first, last, "--tolerance=10"});
    run_to(0, {"checkpoint", "diff", last, path, "--what=all"});
    run_to(2, {"checkpoint", "diff", first, last, "--tolerance=-1"});
    run_to(3, {"checkpoint", "diff", first, dir.file("nothing")});
  }
  SUBCASE("a newer format is refused by its number") {
    Json index = read_json(last / "index.json");
    index.erase("checksum");
    index["version"] = 7;
    dir.write("run/checkpoints/step-00000020/index.json", index.dump());
    const std::string problem = "has format version 7; this build reads up to 1";
    CHECK(holds(run_to(3, {"checkpoint", "inspect", last}).err, problem));
    CHECK(holds(run_to(1, {"checkpoint", "verify", last}).out, problem));
    CHECK(holds(run_to(3, {"checkpoint", "diff", first, last}).err, problem));
    CHECK(
        holds(run_to(3, {"checkpoint", "reshard", last, dir.file("o"), "--world=1"}).err, problem));
    const std::string list = run_to(0, {"checkpoint", "list", path}).out;
    CHECK(holds(list, problem));
    CHECK(holds(list, "        20  newer format  "));
    int newer = 0;
    for (const Json& entry : json_of({"checkpoint", "list", path})) {
      newer += entry.at("state") == "newer format" ? 1 : 0;
      CHECK(entry.at("state") != "broken");
    }
    CHECK(newer == 1);
  }
}
