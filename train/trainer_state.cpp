#include "train/trainer_state.h"

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/checkpoint/find.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kFormat = "tessera-trainer";
constexpr std::int64_t kVersion = 1;

}  // namespace

std::string format_trainer_state(const TrainerState& state) {
  const Json json = {{"format", kFormat},
                     {"version", kVersion},
                     {"step", state.step},
                     {"position", state.position},
                     {"tokenizer", Json::parse(state.tokenizer)},
                     {"config", Json::parse(state.config)},
                     {"val_loss", state.val_loss ? Json(*state.val_loss) : Json()}};
  return json.dump(1) + "\n";
}

TrainerState parse_trainer_state(const std::string& text, const std::string& source) {
  const Json json = io::parse_json(text, source);
  const io::JsonReader root(json, source);
  const std::string& format = root.at("format").string();
  require<CorruptCheckpoint>(format == kFormat, "{}: format is '{}', expected '{}'", source, format,
                             kFormat);
  const std::int64_t version = root.at("version").integer(1);
  if (version > kVersion) throw io::NewerFormat(source, version, kVersion);
  TrainerState state{root.at("step").integer(), root.at("position").integer(),
                     root.at("tokenizer").value().dump(), root.at("config").value().dump()};
  if (root.has("val_loss") && root.at("val_loss").value().is_number())
    state.val_loss = root.at("val_loss").value().get<double>();
  return state;
}

TrainerState read_trainer_state(const io::CheckpointReader& reader) {
  const io::CheckpointIndex& index = reader.index();
  const std::string text = reader.trainer_json();
  TrainerState state = parse_trainer_state(text, (reader.path() / index.trainer->file).string());
  const std::int64_t updates = index.optimizer ? index.optimizer->step : index.step;
  require<CorruptCheckpoint>(
      state.step == index.step && updates == index.step,
      "{} is of step {}, but has a trainer state of step {} and an optimizer state of step {}",
      reader.path().string(), index.step, state.step, updates);
  return state;
}

std::optional<std::int64_t> newest_step(const fs::path& run_dir) {
  try {
    const auto found = io::find_checkpoints(run_dir);
    return found.empty() ? std::nullopt : std::optional(found.back().step);
  } catch (const IoError&) {
    return std::nullopt;
  }
}

std::optional<double> stored_val_loss(const fs::path& checkpoint) {
  constexpr std::int64_t kMaxBytes = std::int64_t{64} << 20;
  const fs::path file = checkpoint / "trainer.json";
  std::error_code error;
  if (fs::symlink_status(file, error).type() == fs::file_type::not_found) return std::nullopt;
  return parse_trainer_state(io::read_file(file, kMaxBytes, io::Links::Refuse), file.string())
      .val_loss;
}

}  // namespace tessera::train
