// Flips random bits of a checkpoint's files, one at a time: verification must detect each flip, and
// name the file and the tensor, if any. TESSERA_BIT_FLIPS is the number of flips.

#include <doctest/doctest.h>

#include <cstdlib>
#include <random>

#include "io/checkpoint/verify.h"
#include "tests/io/support.h"
#include "tests/support/fault_log.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

int wanted_flips() {
  const char* text = std::getenv("TESSERA_BIT_FLIPS");
  return text ? std::atoi(text) : 400;
}

/// A checkpoint file with its content and the byte ranges of its tensors.
struct Target {
  std::string name, content;
  std::vector<std::pair<const Chunk*, std::string>> tensors{};
};

void write_byte(const fs::path& path, std::int64_t at, char byte) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(at);
  file.put(byte);
  REQUIRE(file.flush());
}

/// "file tensor" and message of each problem found.
std::vector<std::pair<std::string, std::string>> verify(const fs::path& path) {
  try {
    const std::string source = (path / "index.json").string();
    const auto index = parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source);
    std::vector<std::pair<std::string, std::string>> result;
    for (const VerifyProblem& problem : verify_checkpoint(path, index).problems) {
      result.emplace_back(problem.file, problem.tensor);
    }
    return result;
  } catch (const CorruptCheckpoint& error) {
    REQUIRE(std::string(error.what()).find("index.json") != std::string::npos);
    return {{"index.json", ""}};
  }
}

TEST_CASE("every flipped bit is detected, with its file and tensor") {
  TempDir dir;
  const fs::path path =
      save(make_sample_model(), dir.path(), {.world_size = 4, .chunk_bytes = 128});
  const CheckpointReader reader = CheckpointReader::open(path);
  const CheckpointIndex& index = reader.index();
  std::vector<Target> targets;
  for (const auto& item : fs::directory_iterator(path)) {
    targets.push_back({item.path().filename().string(), read_text(item.path())});
  }
  std::sort(targets.begin(), targets.end(),
            [](const Target& a, const Target& b) { return a.name < b.name; });
  REQUIRE(targets.size() == 6);
  std::size_t bytes = 0;
  for (Target& target : targets) {
    bytes += target.content.size();
    for (const Section& section : index.tensor_sections()) {
      for (const auto& [name, tensor] : *index.tensors(section)) {
        for (const Chunk& chunk : tensor.chunks) {
          if (chunk.file != target.name) continue;
          target.tensors.emplace_back(&chunk, fmt::format("{}/{}", section.name(), name));
        }
      }
    }
  }
  REQUIRE(verify(path).empty());

  std::mt19937_64 random(20'260'131);
  std::size_t in_index = 0, in_headers = 0, in_tensors = 0, in_trainer = 0;
  const int flips = wanted_flips();
  for (int flip = 0; flip < flips; ++flip) {
    // Half of the flips anywhere, half in small files and headers, outside of tensors.
    Target* target = &targets[random() % targets.size()];
    std::size_t at = 0;
    if (flip % 2 == 0) {
      at = random() % bytes;
      for (target = targets.data(); at >= target->content.size(); ++target) {
        at -= target->content.size();
      }
    } else if (target->name.ends_with(".safetensors")) {
      at = random() % static_cast<std::size_t>(index.headers.at(target->name).size);
    } else {
      at = random() % target->content.size();
    }
    const int bit = static_cast<int>(random() % 8);
    const auto place = static_cast<std::int64_t>(at);
    std::string tensor;
    for (const auto& [chunk, name] : target->tensors) {
      if (chunk->byte_begin <= place && place < chunk->byte_end) tensor = name;
    }
    const fs::path file = path / target->name;
    write_byte(file, place, static_cast<char>(target->content[at] ^ (1 << bit)));
    const auto problems = verify(path);
    write_byte(file, place, target->content[at]);

    CAPTURE(target->name);
    CAPTURE(at);
    CAPTURE(bit);
    REQUIRE_FALSE(problems.empty());
    for (const auto& [blamed, blamed_tensor] : problems) CHECK(blamed == target->name);
    if (!tensor.empty()) {
      REQUIRE(problems.size() == 1);
      CHECK(problems[0].second == tensor);
    }
    ++(target->name == "index.json"     ? in_index
       : target->name == "trainer.json" ? in_trainer
       : tensor.empty()                 ? in_headers
                                        : in_tensors);
  }
  CHECK(verify(path).empty());
  log_fault(R"({"fault": "flip", "point": "checkpoint", "world": 4, "wrong": "", "count": )" +
            std::to_string(flips) + "}");
  MESSAGE(flips << " flips detected: " << in_index << " in the index, " << in_headers
                << " in headers of shards, " << in_tensors << " in tensors, " << in_trainer
                << " in trainer.json");
  CHECK(in_index * in_headers * in_tensors * in_trainer > 0);
}

}  // namespace
}  // namespace tessera::io
