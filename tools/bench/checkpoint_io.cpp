// Saves and loads a checkpoint of a GPT-2 (weights and both moments) with one process per rank,
// through save_checkpoint() and read_parts() as in a training run. Used by checkpoint_io.py,
// which compares it with dd, and by consolidate.py.
//
//   tessera_checkpoint_io plan [--size 2GiB] [--width 1024] [--world 2]
//   tessera_checkpoint_io save DIR SOURCE [options of plan] [--chunk 256KiB]
//   tessera_checkpoint_io make DIR [options of plan]
//   tessera_checkpoint_io load CHECKPOINT [--world 2] [--threads 4]
//
// plan: prints the bytes that each rank saves. save: writes DIR/checkpoints/step-00000001 with the
// bytes of the file SOURCE as values; SOURCE must be at least as large as a rank's share. make:
// writes random weights without moments, which may exceed memory because tensors share a buffer.
// load: each rank reads its share into allocated memory. Times run from when all ranks are ready
// until the last one is done. Prints one line of JSON.
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/shard_layout.h"
#include "io/base/json.h"
#include "io/base/size.h"
#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "io/hf/family.h"
#include "io/pump/read_parts.h"

namespace tessera::io {
namespace {

constexpr int kMaxRanks = 64;

// In `make`, each part starts kShift bytes after the previous part in the buffer, modulo kShifts.
constexpr std::int64_t kShift = 4096 * 37, kShifts = std::int64_t{64} << 20;

struct Options {
  std::string command, path, source;
  std::string size = "2GiB", chunk;  // chunk: SaveRequest::chunk_bytes
  std::int64_t width = 1024;
  int world_size = 2, threads = 4;

  std::vector<Section> sections() const {
    if (command == "make") return {kModelSection};
    return {kModelSection, {"exp_avg"}, {"exp_avg_sq"}};
  }
};

/// "model" section of a GPT-2 of about options.size.
Json model_of(const Options& options) {
  const std::int64_t width = options.width, vocabulary = 50257, positions = 1024;
  const std::int64_t per_layer = 12 * width * width + 13 * width;
  const std::int64_t elements = parse_bytes(options.size) / 4 / std::ssize(options.sections());
  const std::int64_t rest = elements - (vocabulary + positions) * width;
  return {{"arch", "gpt2"},
          {"n_layer", std::max<std::int64_t>(1, (rest + per_layer / 2) / per_layer)},
          {"n_head", std::max<std::int64_t>(1, width / 128)},
          {"n_embd", width},
          {"vocab_size", vocabulary},
          {"seq_len", positions},
          {"layer_norm_eps", 1e-5},
          {"dropout", 0.0}};
}

/// Shard layout of training: one unit per block and one for the rest.
std::vector<ShardLayout> units_of(const Json& config, int world_size) {
  std::map<std::string, std::vector<ShardLayout::Parameter>> units;
  for (const TensorInfo& info : model_tensors(config)) {
    const bool block = info.name.starts_with("h.");
    units[block ? info.name.substr(0, info.name.find('.', 2)) : "root"].push_back(
        {info.name, info.shape, false});
  }
  std::vector<ShardLayout> layouts;
  for (const auto& [unit, parameters] : units) layouts.emplace_back(unit, parameters, world_size);
  return layouts;
}

/// Memory shared by the forked ranks.
struct Board {
  struct Slot {
    std::size_t size;
    std::array<char, 8192> text;
    std::int64_t wanted, read;  // bytes
  };
  pthread_barrier_t barrier;
  std::array<Slot, kMaxRanks> slots;
  double seconds;

  static Board* make(int ranks) {
    void* const memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require<IoError>(memory != MAP_FAILED, "cannot map {} bytes: {}", sizeof(Board),
                     std::strerror(errno));
    auto* const board = new (memory) Board;
    pthread_barrierattr_t attributes;
    ::pthread_barrierattr_init(&attributes);
    ::pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_barrier_init(&board->barrier, &attributes, static_cast<unsigned>(ranks));
    return board;
  }
  void wait() { ::pthread_barrier_wait(&barrier); }
  /// Called by all ranks; `seconds` becomes the time from when all are ready until all are done.
  template <typename F>
  void measure(F&& work) {
    wait();
    const auto start = std::chrono::steady_clock::now();
    work();
    wait();
    seconds = seconds_since(start);
  }
};

class BoardCoordinator : public SaveCoordinator {
 public:
  BoardCoordinator(Board& board, int rank, int world_size)
      : board_(board), rank_(rank), world_size_(world_size) {}

  std::vector<std::string> exchange(const std::string&, std::string_view mine) override {
    Board::Slot& slot = board_.slots[static_cast<std::size_t>(rank_)];
    slot.size = mine.copy(slot.text.data(), slot.text.size());
    board_.wait();
    std::vector<std::string> all;
    for (int rank = 0; rank < world_size_; ++rank) {
      const Board::Slot& other = board_.slots[static_cast<std::size_t>(rank)];
      all.emplace_back(other.text.data(), other.size);
    }
    board_.wait();
    return all;
  }

 private:
  Board& board_;
  int rank_, world_size_;
};

/// Calls f(section, slot, range, bytes) for each part that the rank owns.
template <typename F>
void for_each_part(const Options& options, const Json& config, int rank, F&& f) {
  for (const ShardLayout& unit : units_of(config, options.world_size)) {
    for (const SlotRange& range : unit.ranges_of_rank(rank)) {
      for (const Section& section : options.sections()) {
        f(section, unit.slots()[static_cast<std::size_t>(range.slot)], range,
          (range.end - range.begin) * 4);
      }
    }
  }
}

std::int64_t bytes_of_rank(const Options& options, const Json& config, int rank) {
  std::int64_t total = 0;
  for_each_part(
      options, config, rank,
      [&](const Section&, const auto&, const auto&, std::int64_t bytes) { total += bytes; });
  return total;
}

/// Values to save: for `save` the content of SOURCE; for `make` random floats for all tensors.
std::string read_values(const Options& options, const Json& config) {
  if (options.command == "load") return {};
  if (options.command == "save") return read_file(options.source, std::int64_t{1} << 62);
  std::int64_t longest = 0;
  for (const ShardLayout& unit : units_of(config, options.world_size)) {
    longest = std::max(longest, unit.segment_size() * 4);
  }
  std::string values(static_cast<std::size_t>(longest + kShifts), '\0');
  std::mt19937 random(1);
  for (std::size_t i = 0; i + 4 <= values.size(); i += 4) {
    const float value = (static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F) * 0.1F;
    std::memcpy(&values[i], &value, 4);
  }
  return values;
}

/// Runs `body` in one process per rank.
void run_ranks(int world_size, const std::function<void(int rank)>& body) {
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t pid = ::fork();
    require<IoError>(pid >= 0, "cannot fork: {}", std::strerror(errno));
    if (pid > 0) {
      ranks.push_back(pid);
      continue;
    }
    try {
      body(rank);
      ::_exit(0);
    } catch (const std::exception& error) {
      fmt::print(stderr, "rank {}: {}\n", rank, error.what());
      ::_exit(1);
    }
  }
  bool failed = false;
  for (int i = 0; i < world_size; ++i) {
    int status = 0;
    ::waitpid(-1, &status, 0);
    if (failed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    failed = true;  // the other ranks would wait for it forever
    for (const pid_t pid : ranks) ::kill(pid, SIGKILL);
  }
  require<IoError>(!failed, "a rank failed");
}

void save_rank(const Options& options, const Json& config, const std::string& values, Board& board,
               int rank) {
  const bool repeats = options.command == "make";
  const std::int64_t needed = bytes_of_rank(options, config, rank);
  require(repeats || needed <= static_cast<std::int64_t>(values.size()),
          "{} has {} bytes; rank {} saves {}", options.source, values.size(), rank, needed);
  SaveRequest request;
  request.checkpoints_dir = fs::path(options.path) / "checkpoints";
  request.step = 1;
  request.rank = rank;
  request.world_size = options.world_size;
  request.run_id = "benchmark";
  request.model_config = config.dump();
  if (!options.chunk.empty()) request.chunk_bytes = parse_bytes(options.chunk);
  std::int64_t at = 0;
  for_each_part(options, config, rank,
                [&](const Section& section, const ParameterSlot& slot, const SlotRange& range,
                    std::int64_t bytes) {
                  auto& parts = request.parts[section];
                  parts.push_back({slot.name, slot.shape, DType::F32, range.begin, range.end,
                                   values.data() + at});
                  at = repeats ? (at + kShift) % kShifts : at + bytes;
                });
  BoardCoordinator coordinator(board, rank, options.world_size);
  board.measure([&] { save_checkpoint(request, coordinator); });
  board.slots[static_cast<std::size_t>(rank)].wanted = needed;
}

void load_rank(const Options& options, Board& board, int rank) {
  const Json config = Json::parse(CheckpointReader::open(options.path).index().model_config);
  std::string memory(static_cast<std::size_t>(bytes_of_rank(options, config, rank)), '\1');
  struct Wanted {
    Section section;
    ReadPart part;
  };
  std::vector<Wanted> wanted;
  char* at = memory.data();
  for_each_part(
      options, config, rank,
      [&](const Section& section, const ParameterSlot& slot, const SlotRange& range,
          std::int64_t bytes) {
        wanted.push_back({section, {nullptr, slot.name, range.begin, range.end, DType::F32, at}});
        at += bytes;
      });
  board.measure([&] {
    const auto reader = CheckpointReader::open(options.path);
    std::vector<ReadPart> parts;
    for (Wanted& w : wanted) {
      w.part.source = &reader.source(w.section);
      parts.push_back(w.part);
    }
    const ReadReport report = read_parts(parts, {.threads = options.threads});
    Board::Slot& slot = board.slots[static_cast<std::size_t>(rank)];
    slot.wanted = report.wanted_bytes;
    slot.read = report.read_bytes;
  });
}

Json run(const Options& options) {
  const int world_size = options.world_size;
  const Json config = model_of(options);
  Json ranks = Json::array();
  if (options.command == "plan") {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.push_back(bytes_of_rank(options, config, rank));
    }
    return {{"rank_bytes", ranks}};
  }
  const std::string values = read_values(options, config);
  Board& board = *Board::make(world_size);
  run_ranks(world_size, [&](int rank) {
    options.command == "load" ? load_rank(options, board, rank)
                              : save_rank(options, config, values, board, rank);
  });
  std::int64_t bytes = 0, read = 0;
  for (const Board::Slot& slot : board.slots) {
    bytes += slot.wanted;
    read += slot.read;
  }
  return {{"seconds", board.seconds}, {"bytes", bytes}, {"read_bytes", read}};
}

}  // namespace
}  // namespace tessera::io

int main(int argc, char** argv) {
  tessera::io::Options options;
  CLI::App app("Saves and loads a checkpoint of a GPT-2 with one process per rank");
  app.require_subcommand(1);
  for (const char* name : {"plan", "save", "make", "load"}) {
    const std::string_view command = name;
    CLI::App* const sub = app.add_subcommand(name);
    sub->callback([&options, name] { options.command = name; });
    if (command != "plan") sub->add_option("PATH", options.path)->required();
    if (command == "save") sub->add_option("SOURCE", options.source)->required();
    sub->add_option("--size", options.size, "Of the checkpoint");
    sub->add_option("--width", options.width);
    sub->add_option("--world", options.world_size)->check(CLI::Range(1, tessera::io::kMaxRanks));
    sub->add_option("--chunk", options.chunk);
    sub->add_option("--threads", options.threads);
  }
  CLI11_PARSE(app, argc, argv);
  try {
    fmt::print("{}\n", tessera::io::run(options).dump());
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_checkpoint_io: {}\n", error.what());
    return 1;
  }
}
