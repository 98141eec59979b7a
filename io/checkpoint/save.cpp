#include "io/checkpoint/save.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/agree.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/index.h"
#include "io/checkpoint/merge_index.h"
#include "io/checkpoint/read_back.h"
#include "io/checkpoint/shard.h"

namespace tessera::io {
namespace {

constexpr const char* kTrainerFile = "trainer.json";
// Answer of rank 0 in phase "room" if a committed checkpoint of the same step exists.
constexpr std::string_view kReplaces = "replaces";

/// The JSON that a rank returns from its share of a phase.
class Answer {
 public:
  Answer(const std::string& text, std::size_t rank)
      : source_(fmt::format("answer of rank {}", rank)), json_(parse_json(text, source_)) {}
  JsonReader at(const char* key) const { return JsonReader(json_, source_).at(key); }
  bool has(const char* key) const { return json_.contains(key); }

 private:
  const std::string source_;
  const Json json_;
};

std::string part_name(std::size_t rank) { return fmt::format("rank-{:05}.part.json", rank); }

/// One save, as executed by one rank.
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
      settle(agree("begin", [&] { return begin(); }));
      replaces_ = agree("room", [&] { return make_room(); })[0] == kReplaces;
      const auto parts = agree("written", [&] { return write(report); });
      if (replaces_) {
        // Verifies the new checkpoint first, because the commit deletes the one that it replaces.
        agree("indexed", [&] { return write_index(parts); });
        agree("verified", [&] { return read_back(temporary_, request_), std::string(); });
      }
      const auto total = agree("committed", [&] { return commit(parts); });
      report.total_bytes = std::stoll(total[0]);
    } catch (...) {
      if (request_.rank == 0 && !renamed_) {
        std::error_code ignored;
        fs::remove_all(temporary_, ignored);
      }
      throw;
    }
    report.seconds = seconds_since(start);
    return report;
  }

 private:
  template <typename Share>
  std::vector<std::string> agree(const std::string& phase, Share&& share) {
    const auto path = (request_.checkpoints_dir / name_).string();
    return io::agree(request_, coordinator_, fmt::format("save/{}/{}", name_, phase),
                     {fmt::format("checkpoint {} of step {} was not saved", path, request_.step),
                      "former checkpoints are unchanged"},
                     std::forward<Share>(share));
  }

  std::string begin() {
    const std::string& id = request_.run_id;
    require(is_run_id(id), "run id \"{}\" must be 1 to 100 letters, digits, '.', '_' or '-'", id);
    require(request_.step >= 0 && request_.world_size >= 1 &&
                request_.world_size <= kMaxWorldSize && request_.rank >= 0 &&
                request_.rank < request_.world_size,
            "invalid step {}, rank {} of {}", request_.step, request_.rank, request_.world_size);
    if (request_.rank == 0) {
      require(parse_json(request_.model_config, "model_config").is_object(),
              "the model's configuration must be an object");
    }
    plan_ = plan_shard(request_);
    if (request_.rank == 0) {
      make_directories_durably(request_.checkpoints_dir);
      remove_leftovers();  // before the ranks check the free space
    }
    return Json{{"terms", fmt::format("step {}, run {}, world size {}", request_.step, id,
                                      request_.world_size)},
                {"bytes", plan_.file_bytes + plan_.index_bytes},
                {"trainer", request_.trainer_json.empty() ? 0 : 1}}
        .dump();
  }

  // Compares the ranks' terms. Computes the bytes needed and the rank that writes trainer.json.
  void settle(const std::vector<std::string>& answers) {
    const std::string terms = Answer(answers[0], 0).at("terms").string();
    std::int64_t fewest = 0;
    for (std::size_t rank = 0; rank < answers.size(); ++rank) {
      const Answer answer(answers[rank], rank);
      require<IoError>(answer.at("terms").string() == terms,
                       "checkpoint {} was not saved: rank 0 saves {}, rank {} saves {}", name_,
                       terms, rank, answer.at("terms").string());
      const std::int64_t bytes = answer.at("bytes").integer();
      needed_ += bytes;
      if (answer.at("trainer").integer() != 0 && (trainer_rank_ < 0 || bytes <= fewest)) {
        trainer_rank_ = static_cast<int>(rank);
        fewest = bytes;
      }
    }
    needed_ += static_cast<std::int64_t>(request_.trainer_json.size());
  }

  std::string make_room() {
    const std::int64_t available = request_.free_bytes(request_.checkpoints_dir);
    require<IoError>(available < 0 || available >= needed_,
                     "{} bytes needed for {}, {} bytes free on the file system of {}; free some "
                     "space, or keep fewer checkpoints",
                     needed_,
                     request_.world_size == 1 ? std::string("it")
                                              : fmt::format("all {} ranks", request_.world_size),
                     available, request_.checkpoints_dir.string());
    if (request_.rank == 0) {
      std::error_code error;
      fs::create_directory(temporary_, error);
      require<IoError>(!error, "cannot make {}: {}", temporary_.string(), error.message());
      sync_directory(request_.checkpoints_dir);
      request_.pass("directory-created");
      if (is_there(request_.checkpoints_dir / name_)) return std::string(kReplaces);
    }
    return "";
  }

  // Removes attempts and interrupted removals of all run ids, because a restarted run has another
  // id. No other run uses the directory now. Throws only if this attempt's path cannot be removed.
  void remove_leftovers() const {
    std::error_code error;
    for (const fs::path& path : list_directory(request_.checkpoints_dir, error)) {
      const std::string name = path.filename().string();
      if (!name.starts_with("step-") || !name.ends_with(".tmp")) continue;
      fs::remove_all(path, error);
      require<IoError>(!error || path != temporary_, "cannot remove {}: {}", path.string(),
                       error.message());
    }
  }

  // The rank's part of the index goes to rank 0 as a file, because it grows with the model and
  // messages of the coordinator are small.
  std::string write(SaveReport& report) {
    const std::int64_t chunk_bytes = chunk_bytes_of(needed_, request_.chunk_bytes);
    const std::string text = write_shard(request_, plan_, chunk_bytes, temporary_);
    report.bytes = plan_.file_bytes;
    File file = File::create(temporary_ / part_name(static_cast<std::size_t>(request_.rank)));
    file.write(text.data(), text.size());
    file.finish();
    request_.pass("part-written");
    Json answer{{"bytes", text.size()}, {"checksum", checksum_of(text)}};
    if (request_.rank == trainer_rank_) {
      const std::string& trainer = request_.trainer_json;
      write_file_atomically(temporary_ / kTrainerFile, trainer);
      answer["trainer"] = {
          {"file", kTrainerFile}, {"size", trainer.size()}, {"checksum", checksum_of(trainer)}};
      request_.pass("trainer-written");
    }
    return answer.dump();
  }

  static std::string checksum_of(const std::string& text) {
    return format_checksum(crc64(text.data(), text.size()));
  }

  std::string read_part(const fs::path& path, std::size_t rank, const Answer& written) const {
    std::string text = read_file(path, request_.max_index_bytes, Links::Refuse);
    const std::int64_t bytes = written.at("bytes").integer();
    require<CorruptCheckpoint>(static_cast<std::int64_t>(text.size()) == bytes &&
                                   checksum_of(text) == written.at("checksum").string(),
                               "{} differs from what rank {} wrote: {} bytes, {} expected",
                               path.string(), rank, text.size(), bytes);
    return text;
  }

  std::string build_index(const std::vector<std::string>& answers) {
    IndexMerger merger;
    for (std::size_t rank = 0; rank < answers.size(); ++rank) {
      const Answer written(answers[rank], rank);
      if (written.has("trainer")) merger.sections["trainer"] = written.at("trainer").object();
      const fs::path path = temporary_ / part_name(rank);
      merger.add(shard_name(static_cast<int>(rank), request_.world_size),
                 read_part(path, rank, written), path.string());
    }
    CheckpointIndex frame;
    frame.step = request_.step;
    frame.world_size = request_.world_size;
    frame.run_id = request_.run_id;
    frame.created = utc_now();
    frame.tessera_version = TESSERA_VERSION;
    frame.model_config = request_.model_config;
    const CheckpointIndex index = merger.finish(frame, (temporary_ / "index.json").string());
    for (const auto& [name, size] : index.files) total_bytes_ += size;
    std::string text = format_index(index);
    require<IoError>(static_cast<std::int64_t>(text.size()) <= request_.max_index_bytes,
                     "the index has {} bytes, but readers accept {}: save on fewer ranks",
                     text.size(), request_.max_index_bytes);
    return text;
  }

  std::string write_index(const std::vector<std::string>& parts) {
    if (request_.rank != 0) return "";
    const std::string index = build_index(parts);
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      std::error_code ignored;  // readers ignore files not in the index
      fs::remove(temporary_ / part_name(rank), ignored);
    }
    write_file_atomically(temporary_ / "index.json", index);
    request_.pass("index-written");
    return "";
  }

  std::string commit(const std::vector<std::string>& parts) {
    if (request_.rank != 0) return "";
    const fs::path target = request_.checkpoints_dir / name_;
    if (replaces_) {
      exchange_paths(temporary_, target);
    } else {
      write_index(parts);
      rename_path(temporary_, target);
    }
    renamed_ = true;
    request_.pass("renamed");
    sync_directory(request_.checkpoints_dir);
    request_.pass("committed");
    std::error_code ignored;
    if (replaces_) fs::remove_all(temporary_, ignored);
    try {
      write_file_atomically(request_.checkpoints_dir / "latest", name_ + "\n");
    } catch (const IoError&) {
      // Readers do not rely on `latest`; the checkpoint is committed.
    }
    request_.pass("latest-written");
    return std::to_string(total_bytes_);
  }

  const SaveRequest& request_;
  SaveCoordinator& coordinator_;
  const std::string name_;
  const fs::path temporary_;
  ShardPlan plan_;
  std::int64_t needed_ = 0;       // bytes that all ranks write
  int trainer_rank_ = -1;         // rank that writes trainer.json
  std::int64_t total_bytes_ = 0;  // size of all shards; set on rank 0
  bool replaces_ = false, renamed_ = false;
};

}  // namespace

SaveReport save_checkpoint(const SaveRequest& request, SaveCoordinator& coordinator) {
  return Attempt(request, coordinator).run();
}

}  // namespace tessera::io
