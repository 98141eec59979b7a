// Saves a GPT-2 checkpoint with random weights, of any size and world size, for benchmarks of
// readers. All weights map the same 64 MiB of memory, so that 100 GB need no more.
//
//   tessera_make_checkpoint DIR [--size 8GiB] [--world 4] [--width 2560] [--step 1] [--optimizer]
//
// Writes DIR/checkpoints/step-NNNNNNNN. --size: bytes of the weights; --optimizer adds two moments
// of that size each.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <thread>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/size.h"
#include "io/checkpoint/save.h"
#include "tools/bench/gpt2_units.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kPattern = std::int64_t{64} << 20;  // bytes
constexpr std::chrono::minutes kDeadline{30};

struct Options {
  fs::path dir;
  std::int64_t size = std::int64_t{8} << 30;
  std::int64_t width = 2560, step = 1;
  int world_size = 4;
  bool optimizer = false;
};

/// For ranks that are threads of one process.
class ThreadCoordinator : public SaveCoordinator {
 public:
  struct Board {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::map<int, std::string>> values;
  };
  ThreadCoordinator(Board& board, int rank, int world_size)
      : board_(board), rank_(rank), world_size_(world_size) {}

  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override {
    std::unique_lock lock(board_.mutex);
    auto& values = board_.values[phase];
    values[rank_] = mine;
    board_.changed.notify_all();
    const bool all = board_.changed.wait_for(
        lock, kDeadline, [&] { return values.size() == static_cast<std::size_t>(world_size_); });
    if (!all) throw IoError("only {} of {} ranks reached {}", values.size(), world_size_, phase);
    std::vector<std::string> result;
    for (const auto& [rank, value] : values) result.push_back(value);
    return result;
  }

 private:
  Board& board_;
  int rank_, world_size_;
};

/// `bytes` of address space that repeat the same 64 MiB of random floats.
class Pattern {
 public:
  explicit Pattern(std::int64_t bytes) : bytes_((bytes + kPattern - 1) / kPattern * kPattern) {
    const int fd = ::memfd_create("weights", MFD_CLOEXEC);
    require<IoError>(fd >= 0 && ::ftruncate(fd, kPattern) == 0, "cannot make 64 MiB of memory: {}",
                     std::strerror(errno));
    void* const all = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require<IoError>(all != MAP_FAILED, "cannot map {} bytes: {}", bytes_, std::strerror(errno));
    data_ = static_cast<char*>(all);
    for (std::int64_t at = 0; at < bytes_; at += kPattern) {
      require<IoError>(::mmap(data_ + at, kPattern, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                              fd, 0) != MAP_FAILED,
                       "cannot map 64 MiB: {}", std::strerror(errno));
    }
    ::close(fd);
    std::mt19937 random(1);
    for (std::int64_t i = 0; i < kPattern; i += 4) {
      const float value = (static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F) * 0.1F;
      std::memcpy(data_ + i, &value, 4);
    }
  }
  ~Pattern() { ::munmap(data_, static_cast<std::size_t>(bytes_)); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  const char* data() const { return data_; }

 private:
  std::int64_t bytes_;
  char* data_;
};

SaveReport save(const Options& options) {
  const Json config = bench::gpt2_of_size(options.size, options.width);
  const std::vector<ShardLayout> units = bench::gpt2_units(config, options.world_size);
  std::int64_t longest = 0;
  for (const ShardLayout& unit : units) longest = std::max(longest, unit.segment_size() * 4);
  const Pattern pattern(longest + kPattern);

  ThreadCoordinator::Board board;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options.world_size));
  SaveReport report;  // rank 0's
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < options.world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        SaveRequest request;
        request.checkpoints_dir = options.dir / "checkpoints";
        request.step = options.step;
        request.rank = rank;
        request.world_size = options.world_size;
        request.run_id = "benchmark";
        request.model_config = config.dump();
        std::int64_t shift = 0;  // different for each tensor, so that no two are equal
        for (const ShardLayout& unit : units) {
          for (const SlotRange& range : unit.ranges_of_rank(rank)) {
            const ParameterSlot& slot = unit.slots()[static_cast<std::size_t>(range.slot)];
            const auto part = [&] {
              shift = (shift + 4096 * 37) % kPattern;
              return TensorPart{slot.name,   slot.shape, DType::F32,
                                range.begin, range.end,  pattern.data() + shift};
            };
            request.model.push_back(part());
            if (!options.optimizer) continue;
            request.exp_avg.push_back(part());
            request.exp_avg_sq.push_back(part());
          }
        }
        ThreadCoordinator coordinator(board, rank, options.world_size);
        const SaveReport mine = save_checkpoint(request, coordinator);
        if (rank == 0) report = mine;
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return report;
}

std::int64_t parse_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size() && value >= 1,
          "\"{}\" is not a positive integer", text);
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> std::string_view {
      require(i + 1 < argc, "{} needs a value", word);
      return argv[++i];
    };
    if (word == "--size") {
      options.size = parse_bytes(value());
    } else if (word == "--world") {
      options.world_size = static_cast<int>(std::min<std::int64_t>(parse_number(value()), 1024));
    } else if (word == "--width") {
      options.width = parse_number(value());
    } else if (word == "--step") {
      options.step = parse_number(value());
    } else if (word == "--optimizer") {
      options.optimizer = true;
    } else {
      require(options.dir.empty() && !word.starts_with("-"),
              "usage: tessera_make_checkpoint DIR [--size 8GiB] [--world 4] [--width 2560] [--step "
              "1] [--optimizer]");
      options.dir = word;
    }
  }
  require(!options.dir.empty(), "DIR is missing: tessera_make_checkpoint DIR");
  return options;
}

}  // namespace
}  // namespace tessera::io

int main(int argc, char** argv) {
  try {
    const auto report = tessera::io::save(tessera::io::parse(argc, argv));
    fmt::print("{}: {} bytes in {:.1f} s\n", report.path.string(), report.total_bytes,
               report.seconds);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_make_checkpoint: {}\n", error.what());
    return 1;
  }
}
