#include "io/checkpoint/save.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/index.h"
#include "io/checkpoint/shard.h"

namespace tessera::io {
namespace {

constexpr std::string_view kOk = "ok\n";
constexpr std::string_view kError = "error\n";
constexpr const char* kTrainerFile = "trainer.json";
// Errors travel as the rest does: through channels that bound what they carry.
constexpr std::size_t kMaxErrorBytes = 2048;

/// What a rank tells of the files it wrote.
struct Written {
  std::int64_t shard_bytes = 0, part_bytes = 0;
  std::uint64_t part_crc = 0;

  std::string str() const {
    return Json{{"shard_bytes", shard_bytes},
                {"part_bytes", part_bytes},
                {"part_checksum", format_checksum(part_crc)}}
        .dump();
  }
  static Written parse(const std::string& text, std::size_t rank) {
    const Json json = parse_json(text, fmt::format("answer of rank {}", rank));
    const JsonReader reader(json, fmt::format("answer of rank {}", rank));
    Written written{reader.at("shard_bytes").integer(), reader.at("part_bytes").integer(), 0};
    require<CorruptCheckpoint>(
        parse_checksum(reader.at("part_checksum").string(), written.part_crc),
        "answer of rank {}: \"{}\" is no checksum", rank, reader.at("part_checksum").string());
    return written;
  }
};

std::string part_name(std::size_t rank) { return fmt::format("rank-{:05}.part.json", rank); }

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

/// One attempt to save, as one rank sees it.
class Attempt {
 public:
  Attempt(const SaveRequest& request, SaveCoordinator& coordinator)
      : request_(request),
        coordinator_(coordinator),
        name_(checkpoint_name(request.step)),
        temporary_(request.checkpoints_dir / fmt::format("{}.{}.tmp", name_, request.run_id)) {}

  SaveReport run() {
    const auto start = std::chrono::steady_clock::now();
    SaveReport report;
    report.path = request_.checkpoints_dir / name_;
    try {
      const auto terms = agree("begin", [&] { return begin(); });
      check_terms(terms);
      const auto parts = agree("written", [&] { return write(report); });
      const auto total = agree("committed", [&] { return commit(parts); });
      report.total_bytes = std::stoll(total[0]);
    } catch (...) {
      if (request_.rank == 0 && !renamed_) {
        std::error_code ignored;
        fs::remove_all(temporary_, ignored);
      }
      throw;
    }
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report;
  }

 private:
  void pass(std::string_view point) const {
    if (request_.at_point) request_.at_point(point);
  }

  // Runs this rank's share of a phase and lets all ranks know how it went. An error here is told,
  // not thrown, so that no peer waits for a rank that has given up.
  template <typename Share>
  std::vector<std::string> agree(const std::string& phase, Share&& share) {
    std::string mine;
    try {
      mine = std::string(kOk) + share();
    } catch (const std::exception& error) {
      mine = std::string(kError) + std::string(error.what()).substr(0, kMaxErrorBytes);
    }
    auto all = coordinator_.exchange(fmt::format("save/{}/{}", name_, phase), mine);
    require<InternalError>(all.size() == static_cast<std::size_t>(request_.world_size),
                           "save of {}: {} answers from {} ranks", name_, all.size(),
                           request_.world_size);
    std::string failures;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].starts_with(kOk)) {
        all[rank].erase(0, kOk.size());
      } else {
        failures += fmt::format("{}rank {}: {}", failures.empty() ? "" : "; ", rank,
                                all[rank].substr(std::min(kError.size(), all[rank].size())));
      }
    }
    require<IoError>(failures.empty(),
                     "checkpoint {} of step {} was not saved: {}; former checkpoints stand",
                     (request_.checkpoints_dir / name_).string(), request_.step, failures);
    return all;
  }

  std::string begin() {
    const std::string& id = request_.run_id;
    require(is_run_id(id), "run id \"{}\" must be 1 to 100 letters, digits, '.', '_' or '-'", id);
    require(request_.step >= 0 && request_.world_size >= 1 &&
                request_.world_size <= kMaxWorldSize && request_.rank >= 0 &&
                request_.rank < request_.world_size,
            "step {}, rank {} of {} do not fit", request_.step, request_.rank, request_.world_size);
    if (request_.rank == 0) {
      require(request_.model_config.is_object(), "the model's configuration must be an object");
      make_directory();
    }
    return fmt::format("step {}, run {}, world size {}", request_.step, id, request_.world_size);
  }

  void make_directory() {
    make_directories_durably(request_.checkpoints_dir);
    remove_leftovers();
    std::error_code error;
    fs::create_directory(temporary_, error);
    require<IoError>(!error, "cannot make {}: {}", temporary_.string(), error.message());
    sync_directory(request_.checkpoints_dir);
    pass("directory-created");
  }

  // What earlier attempts, or an interrupted prune, left behind. A restarted run has another run
  // id, so attempts of all ids go: the directory belongs to one run at a time. Only one that holds
  // the name of this attempt can stop it; others that cannot be removed cost space, not
  // checkpoints.
  void remove_leftovers() const {
    std::error_code error;
    std::vector<fs::path> leftovers;
    fs::directory_iterator items(request_.checkpoints_dir, error);
    for (; !error && items != fs::directory_iterator(); items.increment(error)) {
      const std::string name = items->path().filename().string();
      if (name.starts_with("step-") && name.ends_with(".tmp")) leftovers.push_back(items->path());
    }
    for (const fs::path& path : leftovers) {
      fs::remove_all(path, error);
      require<IoError>(!error || path != temporary_, "cannot remove {}: {}", path.string(),
                       error.message());
    }
  }

  void check_terms(const std::vector<std::string>& terms) const {
    for (std::size_t rank = 1; rank < terms.size(); ++rank) {
      require<IoError>(terms[rank] == terms[0],
                       "checkpoint {} was not saved: rank 0 saves {}, rank {} saves {}", name_,
                       terms[0], rank, terms[rank]);
    }
  }

  // The rank's part of the index goes to rank 0 as a file: it grows with the model, and what the
  // coordinator carries should not.
  std::string write(SaveReport& report) {
    const Json part = write_shard(request_, temporary_);
    report.bytes = part.at("size").get<std::int64_t>();
    const std::string text = part.dump();
    File file = File::create(temporary_ / part_name(static_cast<std::size_t>(request_.rank)));
    file.write(text.data(), text.size());
    file.finish();
    pass("part-written");
    if (request_.rank == 0 && !request_.trainer_json.empty()) {
      write_file_atomically(temporary_ / kTrainerFile, request_.trainer_json);
      pass("trainer-written");
    }
    return Written{report.bytes, static_cast<std::int64_t>(text.size()),
                   crc64(text.data(), text.size())}
        .str();
  }

  Json read_part(std::size_t rank, const Written& written) const {
    const fs::path path = temporary_ / part_name(rank);
    const std::string text = read_file(path, request_.max_index_bytes, Links::Refuse);
    require<CorruptCheckpoint>(static_cast<std::int64_t>(text.size()) == written.part_bytes &&
                                   crc64(text.data(), text.size()) == written.part_crc,
                               "{} is not what rank {} wrote: {} bytes, {} expected", path.string(),
                               rank, text.size(), written.part_bytes);
    return Json::parse(text);
  }

  // Merges what the ranks wrote into one index. The result is parsed again: a set of parts that
  // does not cover every tensor must not be committed.
  std::string build_index(const std::vector<std::string>& parts, std::int64_t& total_bytes) const {
    CheckpointIndex index;
    index.step = request_.step;
    index.world_size = request_.world_size;
    index.run_id = request_.run_id;
    index.created = now_utc();
    index.tessera_version = TESSERA_VERSION;
    index.model_config = request_.model_config;
    if (!request_.trainer_json.empty()) {
      index.trainer =
          TrainerSection{kTrainerFile, static_cast<std::int64_t>(request_.trainer_json.size()),
                         crc64(request_.trainer_json.data(), request_.trainer_json.size())};
    }
    Json merged = Json::object(), files = Json::object();
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      const Written written = Written::parse(parts[rank], rank);
      const Json part = read_part(rank, written);
      total_bytes += written.shard_bytes;
      files[shard_name(static_cast<int>(rank), request_.world_size)] = {
          {"size", written.shard_bytes}, {"header", part.at("header")}};
      for (const auto& [section, tensors] : part.at("sections").items()) {
        for (const auto& [name, tensor] : tensors.items()) {
          Json& whole = merged[section][name];
          if (whole.is_null()) {
            whole = tensor;
            continue;
          }
          require<CorruptCheckpoint>(
              whole["dtype"] == tensor["dtype"] && whole["shape"] == tensor["shape"],
              "rank {} has {}/{} as {}{}, a lower rank as {}{}", rank, section, name,
              tensor["dtype"].dump(), tensor["shape"].dump(), whole["dtype"].dump(),
              whole["shape"].dump());
          for (const Json& chunk : tensor["chunks"]) whole["chunks"].push_back(chunk);
        }
      }
    }
    const auto take = [&](Section section) {
      const auto found = merged.find(std::string(section_name(section)));
      return found == merged.end() ? Json::object() : *found;
    };
    Json json = Json::parse(format_index(index));
    json.erase("checksum");  // of what is now filled in
    json["files"] = std::move(files);
    json["sections"]["model"] = {{"tensors", take(Section::Model)}};
    const Json exp_avg = take(Section::ExpAvg), exp_avg_sq = take(Section::ExpAvgSq);
    if (!exp_avg.empty() || !exp_avg_sq.empty()) {
      json["sections"]["optimizer"] = {
          {"hyper", {{"step", request_.step}}},
          {"tensors", {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}}};
    }
    std::string text = format_index(parse_index(json.dump(), (temporary_ / "index.json").string()));
    require<IoError>(static_cast<std::int64_t>(text.size()) <= request_.max_index_bytes,
                     "the index has {} bytes, and readers accept {}: save on fewer ranks",
                     text.size(), request_.max_index_bytes);
    return text;
  }

  std::string commit(const std::vector<std::string>& parts) {
    if (request_.rank != 0) return "";
    std::int64_t total_bytes = 0;
    const std::string index = build_index(parts, total_bytes);
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      std::error_code ignored;  // readers ignore what the index does not list
      fs::remove(temporary_ / part_name(rank), ignored);
    }
    write_file_atomically(temporary_ / "index.json", index);
    pass("index-written");

    const fs::path target = request_.checkpoints_dir / name_;
    std::error_code error;
    const bool replaces = fs::exists(target, error);
    if (replaces) {
      exchange_paths(temporary_, target);
    } else {
      rename_path(temporary_, target);
    }
    renamed_ = true;
    pass("renamed");
    sync_directory(request_.checkpoints_dir);
    pass("committed");
    if (replaces) fs::remove_all(temporary_, error);
    try {
      write_file_atomically(request_.checkpoints_dir / "latest", name_ + "\n");
    } catch (const IoError&) {
      // A hint that readers do not rely on; the checkpoint is committed all the same.
    }
    pass("latest-written");
    return std::to_string(total_bytes);
  }

  const SaveRequest& request_;
  SaveCoordinator& coordinator_;
  const std::string name_;
  const fs::path temporary_;
  bool renamed_ = false;
};

}  // namespace

std::vector<std::string> SoloCoordinator::exchange(const std::string&, std::string_view mine) {
  return {std::string(mine)};
}

SaveReport save_checkpoint(const SaveRequest& request, SaveCoordinator& coordinator) {
  return Attempt(request, coordinator).run();
}

}  // namespace tessera::io
