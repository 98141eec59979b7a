#include "tests/faults/campaign.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "io/checkpoint/find.h"
#include "tests/e2e/small_run.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

Arguments train(const std::string& text, const std::string& run, int world, std::int64_t steps) {
  return joined(small_run(text, run, world, static_cast<int>(steps)),
                {"--train.global_batch=12", "--model.n_layer=1", "--model.n_embd=16",
                 "--checkpoint.keep=1", fmt::format("--checkpoint.every={}", kFirstStep + 1)});
}

std::vector<LoggedCall> parse_log(const std::string& text) {
  std::vector<LoggedCall> calls;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> fields;
    std::istringstream words(line + "\t");
    for (std::string word; std::getline(words, word, '\t');) fields.push_back(word);
    REQUIRE(fields.size() == 9);
    calls.push_back({std::stoi(fields[0]), std::stoll(fields[1]), fields[2], std::stoull(fields[3]),
                     std::stoll(fields[4]), std::stoll(fields[5]), std::stoll(fields[6]), fields[7],
                     fields[8]});
  }
  return calls;
}

}  // namespace

SavedRun::SavedRun(int world) : world_(world), text_(dir_.write("text.txt", make_text())) {
  run_to(0, train(text_, dir_.file("base"), world_, kFirstStep));
  // Expected content: from a run that keeps all checkpoints, without a preloaded library.
  const std::string calm = copy("calm");
  run_to(0, joined(resume_arguments(calm), {"--checkpoint.keep=0"}));
  for (const io::StepItem& entry : io::find_checkpoints(calm)) {
    content_[entry.step] = content_of(io::CheckpointReader::open(entry.path));
  }
  REQUIRE(content_.size() == 3);
  REQUIRE(content_.contains(kFirstStep));
  REQUIRE(content_.contains(kFirstStep + 1));
  REQUIRE(content_.contains(kLastStep));

  const std::string logged = copy("logged");
  const auto note = [&](const fs::path& path) {
    struct stat status {};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    first_inodes_[status.st_ino] = path;
  };
  note(logged_checkpoints());
  for (const auto& item : fs::recursive_directory_iterator(logged_checkpoints())) note(item.path());
  run_to(0, resume_arguments(logged),
         {{"LD_PRELOAD", kFailingCalls},
          {"TESSERA_FAULT_RANK", "all"},
          {"TESSERA_FAULT_KIND", "log"},
          {"TESSERA_FAULT_LOG", dir_.file("log")}});
  calls_ = parse_log(dir_.read("log"));
  written_ = dir_.read("log.data");
}

std::string SavedRun::copy(const std::string& name) const {
  std::string to = dir_.file(name);
  fs::copy(dir_.file("base"), to, fs::copy_options::recursive);
  return to;
}

Arguments SavedRun::resume_arguments(const std::string& run) const {
  return train(text_, run, world_, kLastStep);
}

const SavedRun& saved_run(int world) {
  static std::mutex mutex;
  static std::map<int, SavedRun> runs;
  const std::lock_guard lock(mutex);
  return runs.try_emplace(world, world).first->second;
}

std::string content_of(const io::CheckpointReader& reader) {
  std::string content = reader.digest();
  for (const io::Section& section : reader.index().tensor_sections()) {
    if (!reader.has(section)) return content + " incomplete";
    for (const auto& [name, tensor] : reader.tensors(section)) {
      content += fmt::format(" {:x}", io::tensor_checksum(tensor).value());
    }
  }
  return content;
}

Newest newest_of(const fs::path& checkpoints) {
  Newest found;
  const io::NewestCheckpoint newest = io::newest_valid(checkpoints, {.verify_data = true});
  for (const std::string& why : newest.skipped) found.skipped += why + "\n";
  if (!newest.reader) return found;
  found.step = newest.reader->index().step;
  found.content = content_of(*newest.reader);
  return found;
}

bool tries_all() {
  const char* const text = std::getenv("TESSERA_FAULT_POINTS");
  return text != nullptr && std::string_view(text) == "all";
}

std::size_t campaign_seed() {
  const char* const text = std::getenv("TESSERA_CAMPAIGN_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

void for_all(std::size_t n, const std::function<void(std::size_t)>& body) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  const char* const jobs = std::getenv("TESSERA_FAULT_JOBS");
  for (int t = jobs == nullptr ? 4 : std::max(1, std::atoi(jobs)); t > 0; --t) {
    threads.emplace_back([&] {
      for (std::size_t i; (i = next++) < n;) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::test
