// Saves and loads a checkpoint of a GPT-2 (weights and both moments) with one process per rank,
// through save_checkpoint() and read_parts() as in a training run. For checkpoint_io.py, which
// compares it with dd.
//
//   tessera_checkpoint_io plan [--size 2GiB] [--width 1024] [--world 2]
//   tessera_checkpoint_io save DIR SOURCE [the same] [--chunk 256KiB]
//   tessera_checkpoint_io load CHECKPOINT [--world 2] [--threads 4]
//
// plan: prints the bytes that each rank saves. save: writes DIR/checkpoints/step-00000001 with the
// bytes of the file SOURCE as values; SOURCE must be at least as large as a rank's share. load:
// each rank reads its share into allocated memory. Times run from when all ranks are ready until
// the last one is done. Prints one line of JSON.
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/size.h"
#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "io/pump/read_parts.h"
#include "tools/bench/gpt2_units.h"

namespace tessera::io {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxRanks = 64;

struct Options {
  std::string command;
  fs::path path, source;
  std::int64_t size = std::int64_t{2} << 30, width = 1024;
  std::int64_t chunk_bytes = 0;  // of SaveRequest
  int world_size = 2, threads = 4;
};

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
    const auto start = Clock::now();
    work();
    wait();
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
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

/// Calls f(section, slot, range) for each part that the rank owns.
template <typename F>
void for_each_part(const Json& config, int rank, int world_size, F&& f) {
  for (const ShardLayout& unit : bench::gpt2_units(config, world_size)) {
    for (const SlotRange& range : unit.ranges_of_rank(rank)) {
      for (const Section section : kSections) {
        f(section, unit.slots()[static_cast<std::size_t>(range.slot)], range);
      }
    }
  }
}

std::int64_t bytes_of_rank(const Json& config, int rank, int world_size) {
  std::int64_t bytes = 0;
  for_each_part(config, rank, world_size, [&](Section, const ParameterSlot&, const SlotRange& r) {
    bytes += (r.end - r.begin) * 4;
  });
  return bytes;
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
    failed = true;  // the others would wait for it forever
    for (const pid_t pid : ranks) ::kill(pid, SIGKILL);
  }
  require<IoError>(!failed, "a rank failed");
}

void save_rank(const Options& options, const Json& config, Board& board, int rank) {
  const std::string values = read_file(options.source, std::int64_t{1} << 62);
  const std::int64_t needed = bytes_of_rank(config, rank, options.world_size);
  require(needed <= static_cast<std::int64_t>(values.size()), "{} has {} bytes; rank {} saves {}",
          options.source.string(), values.size(), rank, needed);
  SaveRequest request;
  request.checkpoints_dir = options.path / "checkpoints";
  request.step = 1;
  request.rank = rank;
  request.world_size = options.world_size;
  request.run_id = "benchmark";
  request.model_config = config.dump();
  request.chunk_bytes = options.chunk_bytes;
  std::int64_t at = 0;
  for_each_part(config, rank, options.world_size,
                [&](Section section, const ParameterSlot& slot, const SlotRange& range) {
                  auto& parts = section == Section::Model    ? request.model
                                : section == Section::ExpAvg ? request.exp_avg
                                                             : request.exp_avg_sq;
                  parts.push_back({slot.name, slot.shape, DType::F32, range.begin, range.end,
                                   values.data() + at});
                  at += (range.end - range.begin) * 4;
                });
  BoardCoordinator coordinator(board, rank, options.world_size);
  board.measure([&] { save_checkpoint(request, coordinator); });
  board.slots[static_cast<std::size_t>(rank)].wanted = at;
}

void load_rank(const Options& options, Board& board, int rank) {
  const Json config = Json::parse(CheckpointReader::open(options.path).index().model_config);
  std::string memory(static_cast<std::size_t>(bytes_of_rank(config, rank, options.world_size)),
                     '\1');
  struct Wanted {
    Section section;
    ReadPart part;
  };
  std::vector<Wanted> wanted;
  char* at = memory.data();
  for_each_part(
      config, rank, options.world_size,
      [&](Section section, const ParameterSlot& slot, const SlotRange& range) {
        wanted.push_back({section, {nullptr, slot.name, range.begin, range.end, DType::F32, at}});
        at += (range.end - range.begin) * 4;
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
  const Json config = bench::gpt2_of_size(options.size / 3, options.width);
  Json ranks = Json::array();
  if (options.command == "plan") {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.push_back(bytes_of_rank(config, rank, world_size));
    }
    return {{"rank_bytes", ranks}};
  }
  Board& board = *Board::make(world_size);
  run_ranks(world_size, [&](int rank) {
    options.command == "save" ? save_rank(options, config, board, rank)
                              : load_rank(options, board, rank);
  });
  std::int64_t bytes = 0, read = 0;
  for (const Board::Slot& slot : board.slots) {
    bytes += slot.wanted;
    read += slot.read;
  }
  return {{"seconds", board.seconds}, {"bytes", bytes}, {"read_bytes", read}};
}

Options parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> std::string {
      require(i + 1 < argc, "{} needs a value", word);
      return argv[++i];
    };
    if (word == "--size") {
      options.size = parse_bytes(value());
    } else if (word == "--width") {
      options.width = std::stoi(value());
    } else if (word == "--chunk") {
      options.chunk_bytes = parse_bytes(value());
    } else if (word == "--world") {
      options.world_size = std::stoi(value());
    } else if (word == "--threads") {
      options.threads = std::stoi(value());
    } else {
      words.emplace_back(word);
    }
  }
  const std::size_t wanted = words.empty() || words[0] == "plan" ? 1 : words[0] == "save" ? 3 : 2;
  require(words.size() == wanted && (wanted != 2 || words[0] == "load"),
          "usage: tessera_checkpoint_io plan | save DIR SOURCE | load CHECKPOINT, [--size 2GiB] "
          "[--width 1024] [--world 2] [--chunk 256KiB] [--threads 4]");
  require(options.world_size >= 1 && options.world_size <= kMaxRanks, "{} ranks: expected 1 to {}",
          options.world_size, kMaxRanks);
  options.command = words[0];
  if (wanted > 1) options.path = words[1];
  if (wanted > 2) options.source = words[2];
  return options;
}

}  // namespace
}  // namespace tessera::io

int main(int argc, char** argv) {
  try {
    fmt::print("{}\n", tessera::io::run(tessera::io::parse(argc, argv)).dump());
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_checkpoint_io: {}\n", error.what());
    return 1;
  }
}
