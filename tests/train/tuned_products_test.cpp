#include "train/tuned_products.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using test::TempDir;

const TunedProducts kTuned = {
    {"NVIDIA H100 80GB HBM3, cuBLASLt 13.1.0",
     {{"8x8x8 NT", {"00ff", 33'554'432, 12.25}}, {"8x8x8 NT gelu", {"", 0, 20.5, true}}}},
    {"NVIDIA A100-SXM4-80GB, cuBLASLt 13.1.0", {{"8x8x8 NT", {"01", 0, 30}}}}};

TEST_CASE("tuned products are written and read back") {
  const std::string text = format_tuned_products(kTuned);
  CHECK(parse_tuned_products(text, "x") == kTuned);
  CHECK(format_tuned_products(parse_tuned_products(text, "x")) == text);
  CHECK(nlohmann::json::parse(text) ==
        nlohmann::json::parse(R"({"format": "tessera-tuned-products", "version": 1, "gpus": {
    "NVIDIA H100 80GB HBM3, cuBLASLt 13.1.0": {
      "8x8x8 NT": {"algorithm": "00ff", "workspace_bytes": 33554432, "microseconds": 12.25},
      "8x8x8 NT gelu": {"apart": true, "microseconds": 20.5}},
    "NVIDIA A100-SXM4-80GB, cuBLASLt 13.1.0": {
      "8x8x8 NT": {"algorithm": "01", "workspace_bytes": 0, "microseconds": 30.0}}}})"));
  CHECK(parse_tuned_products(format_tuned_products({}), "x").empty());
}

TEST_CASE("a damaged file of tuned products: the error names the file and the damage") {
  const auto refused = [](const std::string& text, const std::string& why) {
    CHECK_THROWS_HOLDING(InvalidArgument, why, parse_tuned_products(text, "a.json"));
    CHECK_THROWS_HOLDING(InvalidArgument, "--train.tuned_products",
                         parse_tuned_products(text, "a.json"));
  };
  const auto with = [](const std::string& entry) {
    return R"({"format": "tessera-tuned-products", "version": 1, "gpus": {"g": {"p": )" + entry +
           "}}}";
  };
  refused("", "a.json is empty");
  refused("{\"format\"", "a.json is not valid JSON");
  refused(R"({"format": "other", "version": 1, "gpus": {}})", "a.json: format is \"other\"");
  refused(R"({"format": "tessera-tuned-products", "version": 2, "gpus": {}})",
          "a.json: version is 2; this tessera reads 1");
  refused(R"({"format": "tessera-tuned-products", "version": 1})", "gpus");
  refused(with("[]"), "gpus.g.p");
  refused(with(R"({"algorithm": "00", "workspace_bytes": 0})"), "microseconds");
  refused(with(R"({"algorithm": "00", "workspace_bytes": 0, "microseconds": -1})"),
          "gpus.g.p.microseconds is -1");
  refused(with(R"({"algorithm": "00", "workspace_bytes": -1, "microseconds": 1})"),
          "workspace_bytes");
  refused(with(R"({"algorithm": "0g", "workspace_bytes": 0, "microseconds": 1})"),
          "gpus.g.p.algorithm is \"0g\", not hexadecimal");
  refused(with(R"({"apart": 1, "microseconds": 1})"), "gpus.g.p.apart is 1");
}

TEST_CASE("new entries are added to a file, which keeps those of others") {
  const TempDir dir;
  const fs::path file = dir.file("tuned.json");
  CHECK(open_tuned_products(file).empty());
  CHECK_FALSE(fs::exists(file));
  add_tuned_products(file, kTuned);
  CHECK(open_tuned_products(file) == kTuned);

  TunedProducts newer = {
      {kTuned.begin()->first, {{"8x8x8 NT", {"02", 1, 9}}, {"new", {"03", 2, 8}}}}};
  add_tuned_products(file, newer);
  TunedProducts want = kTuned;
  merge(want, newer);
  CHECK(want.begin()->second.size() == kTuned.begin()->second.size() + 1);
  CHECK(open_tuned_products(file) == want);
  CHECK(std::distance(fs::directory_iterator(dir.path()), {}) == 1);

  newer.begin()->second["huge"] = {std::string(kMostTunedBytes, 'a'), 0, 1};
  CHECK_THROWS_HOLDING(IoError, "start a new file", add_tuned_products(file, newer));
  CHECK(open_tuned_products(file) == want);
}

TEST_CASE("several writers lose no entry") {
  const TempDir dir;
  const fs::path file = dir.file("tuned.json");
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer)
    writers.emplace_back([&, writer] {
      for (int i = 0; i < 5; ++i)
        add_tuned_products(file, {{"gpu", {{fmt::format("{} {}", writer, i), {"01", 0, 1}}}}});
    });
  for (std::thread& writer : writers) writer.join();
  CHECK(open_tuned_products(file).at("gpu").size() == 20);
}

TEST_CASE("a file of tuned products that can't be read or written is refused") {
  const TempDir dir;
  CHECK_THROWS_HOLDING(IoError,
                       "train.tuned_products: cannot write a file in " + dir.file("absent"),
                       open_tuned_products(dir.file("absent") + "/tuned.json"));
  CHECK_THROWS_HOLDING(IoError, "train.tuned_products: cannot replace " + dir.path().string(),
                       open_tuned_products(dir.path()));
  dir.write("long.json", std::string(kMostTunedBytes + 1, ' '));
  CHECK_THROWS_HOLDING(InvalidArgument, dir.file("long.json"),
                       open_tuned_products(dir.file("long.json")));
}

}  // namespace
}  // namespace tessera::train
