#include "tools/tessera/train/checkpoints.h"

#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/checkpoint/find.h"

namespace tessera::tools {
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

std::optional<std::int64_t> parse_step(const fs::path& path, const std::string& text) {
  if (text == "latest") return std::nullopt;
  if (text != "best") {
    std::int64_t step = -1;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, step);
    require(error == std::errc{} && stop == end && step >= 0,
            "--step {}: expected latest, best, or a step's number", text);
    return step;
  }
  std::error_code error;
  require(!fs::exists(path / "index.json", error),
          "--step best chooses among the checkpoints of a run, and {} is one checkpoint",
          path.string());
  std::optional<std::int64_t> best;
  double lowest = std::numeric_limits<double>::infinity();
  for (const io::StepItem& entry : io::find_checkpoints(path)) {
    const auto loss = stored_val_loss(entry.path);
    if (!loss || !(*loss < lowest)) continue;
    best = entry.step;
    lowest = *loss;
  }
  require(
      best.has_value(),
      "--step best: no checkpoint of {} has a validation loss; train with checkpoint.keep_best, "
      "or name a step",
      path.string());
  return best;
}

Json model_section(const models::Gpt2Config& config) {
  return {{"arch", "gpt2"},
          {"n_layer", config.n_layer},
          {"n_head", config.n_head},
          {"n_embd", config.n_embd},
          {"vocab_size", config.vocab_size},
          {"seq_len", config.seq_len},
          {"layer_norm_eps", config.layer_norm_eps},
          {"dropout", config.dropout}};
}

models::Gpt2Config parse_model_section(const Json& section, const std::string& source) {
  const io::JsonReader reader(section, source);
  const std::string& arch = reader.at("arch").string();
  require<Unsupported>(arch == "gpt2", "{}: model.arch {} is not in this build; it has gpt2",
                       source, arch);
  const auto number = [&](const char* key) {
    const Json& value = reader.at(key).value();
    require<CorruptCheckpoint>(value.is_number(), "{}: {} must be a number", source, key);
    return value.get<double>();
  };
  models::Gpt2Config config;
  config.n_layer = reader.at("n_layer").integer(1);
  config.n_head = reader.at("n_head").integer(1);
  config.n_embd = reader.at("n_embd").integer(1);
  config.vocab_size = reader.at("vocab_size").integer(1);
  config.seq_len = reader.at("seq_len").integer(1);
  config.layer_norm_eps = number("layer_norm_eps");
  config.dropout = static_cast<float>(number("dropout"));
  config.validate();
  return config;
}

std::vector<std::string> StoreCoordinator::exchange(const std::string& phase,
                                                    std::string_view mine) {
  // The call count keeps keys unique when a step is saved again. It is equal on all ranks, because
  // they make the same calls.
  return comm::exchange(*store_, fmt::format("{}/{}/{}", name_, calls_++, phase), rank_,
                        world_size_, mine, deadline_);
}

bool saves_beside_training(const Config& config, std::int64_t step) {
  const std::int64_t every = config.checkpoint.every;
  return config.checkpoint.async == "on" && every > 0 &&
         step / every * every + every < config.train.steps;
}

io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer) {
  io::SaveRequest request;
  for (const auto& piece : sharded.owned_pieces()) {
    const auto add = [&](std::vector<io::TensorPart>& parts, const Tensor& values) {
      parts.push_back({piece.parameter->name, piece.parameter->tensor.shape(), values.dtype(),
                       piece.begin, piece.end, values.view().data});
    };
    add(request.model, piece.master);
    if (!with_optimizer || !piece.exp_avg.defined()) continue;
    add(request.exp_avg, piece.exp_avg);
    add(request.exp_avg_sq, piece.exp_avg_sq);
  }
  return request;
}

SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer) {
  SaveState state{make_save_request(sharded, with_optimizer)};
  const auto pieces = sharded.owned_pieces();
  if (pieces.empty() || pieces[0].master.device().type != DeviceType::CUDA) return state;
  const std::shared_ptr<Context> context = pieces[0].master.context();
  std::vector<io::TensorPart*> parts;
  std::size_t bytes = 0;
  const auto bytes_of = [](const io::TensorPart& part) {
    return static_cast<std::size_t>(part.end - part.begin) * dtype_size(part.dtype);
  };
  for (auto* list : {&state.request.model, &state.request.exp_avg, &state.request.exp_avg_sq}) {
    for (io::TensorPart& part : *list) {
      parts.push_back(&part);
      bytes += bytes_of(part);
    }
  }
  state.copies = Storage::allocate_on_host(context, bytes, MemoryCategory::Staging, "checkpoint");
  auto* copy = static_cast<std::byte*>(state.copies->data());
  for (io::TensorPart* part : parts) {
    if (bytes_of(*part) > 0) context->backend().copy_to_host(copy, part->data, bytes_of(*part));
    part->data = copy;
    copy += bytes_of(*part);
  }
  return state;
}

namespace {

// NaN and infinity have an exponent of all ones. Bit operations vectorize, float sums don't.
template <typename Bits, Bits kExponent>
bool all_finite(const void* data, std::int64_t count) {
  const auto* values = static_cast<const Bits*>(data);
  Bits bad = 0;
  for (std::int64_t i = 0; i < count; ++i)
    bad = static_cast<Bits>(bad | static_cast<Bits>((values[i] & kExponent) == kExponent));
  return bad == 0;
}

}  // namespace

bool is_finite(const io::SaveRequest& request) {
  for (const auto* parts : {&request.model, &request.exp_avg, &request.exp_avg_sq}) {
    for (const io::TensorPart& part : *parts) {
      const std::int64_t count = part.end - part.begin;
      if (!(part.dtype == DType::BF16 ? all_finite<std::uint16_t, 0x7f80>(part.data, count)
                                      : all_finite<std::uint32_t, 0x7f800000U>(part.data, count)))
        return false;
    }
  }
  return true;
}

}  // namespace tessera::tools
