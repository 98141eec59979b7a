#include "tools/tessera/run_report/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>

#include "comm/flight_recorder.h"
#include "core/base/error.h"
#include "io/base/file.h"
#include "io/checkpoint/list.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using comm::FlightRecord;

constexpr std::int64_t kTailBytes = 64 * 1024;
constexpr std::size_t kLogLines = 8;
// Limits the problems listed for runs of thousands of ranks.
constexpr std::size_t kProblems = 20;

// Whole lines in the last 64 KiB of a file, oldest first.
std::vector<std::string> tail(const fs::path& path) {
  const io::File file = io::File::open(path);
  const std::int64_t size = file.size();
  const std::int64_t begin = std::max<std::int64_t>(0, size - kTailBytes);
  std::string text(static_cast<std::size_t>(size - begin), '\0');
  file.read(begin, text.data(), text.size());
  std::vector<std::string> lines;
  std::size_t at = begin == 0 ? 0 : std::min(text.find('\n'), text.size() - 1) + 1;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

// The newest line that is an object with numbers `step` and `value`.
std::optional<nlohmann::json> last_line(const std::vector<std::string>& lines, const char* value) {
  for (auto text = lines.rbegin(); text != lines.rend(); ++text) {
    auto line = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
        line.contains(value) && line[value].is_number()) {
      return line;
    }
  }
  return std::nullopt;
}

class Gatherer {
 public:
  explicit Gatherer(const fs::path& dir) { found_.directory = dir; }

  RunEvidence gather() {
    const fs::path& dir = found_.directory;
    std::error_code ignored;
    const auto has = [&](const char* name) { return fs::exists(dir / name, ignored); };
    require<IoError>(fs::is_directory(dir, ignored), "{} is not a directory", dir.string());
    require<IoError>(
        has("flight") || has("config.json") || has("metrics.jsonl") || has(".lock"),
        "{} is not a run: it has neither flight/ nor config.json nor metrics.jsonl; name "
        "the directory given as --run.out",
        dir.string());
    found_.has_config = has("config.json");
    read_records();
    tolerate([&] { read_last(dir / "metrics.jsonl", "loss", found_.last_step, found_.last_loss); });
    if (has("saves.jsonl"))  // absent if checkpoint.every is 0
      tolerate([&] {
        read_last(dir / "saves.jsonl", "seconds", found_.saved_step, found_.save_seconds);
      });
    tolerate([&] { read_checkpoints(); });
    read_logs();  // last, because missing logs may fill the list of problems
    return std::move(found_);
  }

 private:
  template <typename Read>
  void tolerate(const Read& read) {
    try {
      read();
    } catch (const Error& error) {
      add_problem(error.what());
    } catch (const fs::filesystem_error& error) {
      add_problem(error.what());
    }
  }

  void read_records() {
    const fs::path folder = found_.directory / "flight";
    std::map<int, FlightRecord> records;
    std::map<int, std::string> unreadable;
    std::error_code error;
    for (const fs::path& file : io::list_directory(folder, error)) {
      const auto rank = comm::rank_of_flight_file(file.filename().string());
      if (!rank) continue;
      try {
        auto record = comm::read_flight_record(file);
        require<comm::CorruptRecord>(record.rank == *rank, "{}: is the record of rank {}",
                                     file.string(), record.rank);
        records.emplace(*rank, std::move(record));
      } catch (const Error& failure) {
        unreadable.emplace(*rank, failure.what());
      }
    }
    if (error) add_problem(fmt::format("{}: {}", folder.string(), error.message()));
    for (const auto& [rank, why] : unreadable) add_problem(why);
    if (records.empty()) return;
    const FlightRecord newest = std::ranges::max_element(records, {}, [](const auto& r) {
                                  return r.second.start_wall_ns;
                                })->second;
    for (int rank = 0; rank < newest.world_size; ++rank) {
      RankEvidence evidence;
      evidence.rank = rank;
      const auto record = records.find(rank);
      if (record == records.end()) {
        const auto why = unreadable.find(rank);
        evidence.problem =
            why == unreadable.end()
                ? "no record: the rank failed before writing one, or could not create the file"
                : "the record can't be read";
      } else if (!is_of_start(record->second, newest)) {
        evidence.problem = "no record of this start: the file is from another start";
      } else {
        evidence.process = look_at(record->second);
        evidence.record = std::move(record->second);
      }
      found_.ranks.push_back(std::move(evidence));
    }
  }

  // Compares start ids, because an earlier start may have the same run id. A rank has no start id
  // until it has reached the store.
  static bool is_of_start(const FlightRecord& record, const FlightRecord& newest) {
    if (record.world_size != newest.world_size) return false;
    return newest.start_id != 0 ? record.start_id == newest.start_id : record.rank == newest.rank;
  }

  void add_problem(std::string text) {
    if (found_.problems.size() < kProblems) {
      found_.problems.push_back(std::move(text));
    } else if (found_.problems.size() == kProblems) {
      found_.problems.emplace_back("further problems are not listed");
    }
  }

  void read_logs() {
    for (const RankEvidence& rank : found_.ranks) {
      tolerate([&] {
        auto lines = tail(found_.directory / "logs" / fmt::format("rank-{}.log", rank.rank));
        if (lines.size() > kLogLines) {
          lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(kLogLines));
        }
        for (std::string& line : lines) line = escaped(line);
        found_.log_tails[rank.rank] = std::move(lines);
      });
    }
  }

  static void read_last(const fs::path& file, const char* key, std::optional<std::int64_t>& step,
                        std::optional<double>& value) {
    const auto line = last_line(tail(file), key);
    if (!line) return;
    step = line->at("step").get<std::int64_t>();
    value = line->at(key).get<double>();
  }

  void read_checkpoints() {
    if (!fs::exists(found_.directory / "checkpoints")) return;
    for (const io::ListedCheckpoint& entry : io::list_checkpoints(found_.directory)) {
      if (entry.state == io::CheckpointState::Committed && entry.step > found_.checkpoint_step) {
        found_.checkpoint = entry.path;
        found_.checkpoint_step = entry.step;
      } else if (entry.state == io::CheckpointState::Broken ||
                 entry.state == io::CheckpointState::Newer) {
        add_problem(fmt::format("{}: {}", entry.path.string(), entry.problem));
      }
    }
  }

  RunEvidence found_;
};

}  // namespace

RunEvidence gather_evidence(const fs::path& run_dir) { return Gatherer(run_dir).gather(); }

ProcessState look_at(const FlightRecord& record) {
  // A different boot id means another host, or a reboot.
  const bool is_here = !record.boot_id.empty() && record.boot_id == comm::this_boot_id() &&
                       record.pid_start != 0 && record.pid_namespace != 0 &&
                       record.pid_namespace == comm::this_pid_namespace();
  if (!is_here) return ProcessState::Unknown;
  const comm::ProcessLook look = comm::look_at_process(record.pid);
  if (look.state == '-' || look.state == 'Z' || look.state == 'X' || look.start != record.pid_start)
    return ProcessState::Gone;
  return look.state == 'T' || look.state == 't' ? ProcessState::Stopped : ProcessState::Running;
}

}  // namespace tessera::tools
