#include "io/checkpoint/index.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/merge_index.h"
#include "io/safetensors/dtype.h"
#include "io/safetensors/header.h"

namespace tessera::io {
namespace {

// First bytes of an index with a checksum. The checksum is over the whole file, with kNoDigits in
// place of the digits of the checksum.
constexpr std::string_view kChecksumStart = "{\n \"checksum\": \"crc64:";
constexpr std::string_view kNoDigits = "0000000000000000";
// All fields of an index of an early version, which has no checksum.
constexpr std::array<std::string_view, 10> kUncheckedFields = {
    "created",  "files", "format",  "model",   "run_id",
    "sections", "step",  "tessera", "version", "world_size"};

std::uint64_t index_checksum(std::string_view text) {
  std::uint64_t crc = crc64(kChecksumStart.data(), kChecksumStart.size());
  crc = crc64(kNoDigits.data(), kNoDigits.size(), crc);
  const auto rest = text.substr(kChecksumStart.size() + kNoDigits.size());
  return crc64(rest.data(), rest.size(), crc);
}

void check_version(const JsonReader& root, const std::string& source) {
  require<CorruptCheckpoint>(root.at("format").string() == kCheckpointFormat,
                             "{}: expected format \"{}\", found \"{}\"", source, kCheckpointFormat,
                             root.at("format").string());
  const std::int64_t version = root.at("version").integer(1);
  if (version > kCheckpointVersion) throw NewerFormat(source, version, kCheckpointVersion);
}

// A hint for the message on a wrong checksum, because a newer format may use another checksum.
std::string newer_version(std::string_view text, const std::string& source) {
  try {
    const Json json = parse_json(text, source);
    check_version(JsonReader(json, source), source);
  } catch (const NewerFormat& error) {
    return fmt::format("; or a newer tessera wrote it: {}", error.what());
  } catch (const Error&) {
    return {};
  }
  return {};
}

// Verifies the checksum. Runs before parsing, so that damage is not reported as a syntax error.
// @return false if the text has no checksum
bool check_text(std::string_view text, const std::string& source) {
  if (!text.starts_with(kChecksumStart)) return false;
  std::uint64_t stored = 0;
  constexpr std::size_t kDigits = kChecksumStart.size() - std::string_view("crc64:").size();
  const bool right = text.size() > kChecksumStart.size() + kNoDigits.size() &&
                     parse_checksum(text.substr(kDigits, kNoDigits.size() + 6), stored) &&
                     index_checksum(text) == stored;
  require<CorruptCheckpoint>(
      right, "{}: its own checksum is wrong: it was damaged or edited after the save{}", source,
      right ? "" : newer_version(text, source));
  return true;
}

Json shape_to_json(const Shape& shape) {
  return std::vector<std::int64_t>(shape.begin(), shape.end());
}

const std::string& parse_file_name(const JsonReader& json) {
  const std::string& name = json.string();
  require<CorruptCheckpoint>(
      is_plain_name(name),
      "{}: {} is not a plain file name; the files of a checkpoint must be in its own directory",
      json.where(), json.value().dump());
  return name;
}

std::uint64_t parse_crc(const JsonReader& json) {
  std::uint64_t crc = 0;
  require<CorruptCheckpoint>(
      parse_checksum(json.string(), crc),
      "{}: expected a checksum like \"crc64:995dc9bbdf1939fa\", found \"{}\"", json.where(),
      json.string());
  return crc;
}

Chunk parse_chunk(const JsonReader& json, const CheckpointIndex& index, std::int64_t width) {
  Chunk chunk;
  chunk.file = parse_file_name(json.at("file"));
  const auto file = index.files.find(chunk.file);
  require<CorruptCheckpoint>(file != index.files.end(), "{}: {} is not listed under \"files\"",
                             json.where(), chunk.file);
  std::tie(chunk.byte_begin, chunk.byte_end) = parse_range(json.at("bytes"));
  require<CorruptCheckpoint>(chunk.byte_end <= file->second,
                             "{}: ends at byte {}, but {} has {} bytes", json.where(),
                             chunk.byte_end, chunk.file, file->second);
  std::tie(chunk.begin, chunk.end) = parse_range(json.at("elements"));
  const auto header = index.headers.find(chunk.file);
  require<CorruptCheckpoint>(
      header == index.headers.end() || chunk.byte_begin >= header->second.size,
      "{}: begins at byte {}, but the data of {} begins at {}", json.where(), chunk.byte_begin,
      chunk.file, header == index.headers.end() ? 0 : header->second.size);
  const std::int64_t bytes = chunk.byte_end - chunk.byte_begin;
  require<CorruptCheckpoint>(bytes % width == 0 && bytes / width == chunk.end - chunk.begin,
                             "{}: {} elements of {} bytes do not fill {} bytes", json.where(),
                             chunk.end - chunk.begin, width, bytes);
  if (json.has("box")) {
    const JsonReader box = json.at("box");
    chunk.box = Box{parse_shape(box.at("offsets")), parse_shape(box.at("shape"))};
  }
  chunk.crc64 = parse_crc(json.at("checksum"));
  return chunk;
}

TensorRecord parse_tensor(const JsonReader& json, const CheckpointIndex& index) {
  TensorRecord tensor;
  const JsonReader dtype_field = json.at("dtype");
  const auto dtype = dtype_from_safetensors(dtype_field.string());
  require<CorruptCheckpoint>(dtype.has_value(), "{}: unknown dtype \"{}\"", dtype_field.where(),
                             dtype_field.string());
  tensor.dtype = *dtype;
  tensor.shape = parse_shape(json.at("shape"));
  const JsonReader chunks = json.at("chunks");
  for (std::size_t i = 0; i < chunks.array_size(); ++i) {
    tensor.chunks.push_back(parse_chunk(chunks.at(i), index, tensor.width()));
  }
  check_coverage(tensor, json.where());
  return tensor;
}

std::string full_name(const Section& section, const std::string& name) {
  return fmt::format("{}/{}", section.name(), name);
}

TensorMap parse_tensors(const JsonReader& json, const CheckpointIndex& index,
                        const Section& section) {
  TensorMap tensors;
  for (const auto& [name, value] : json.object().items()) {
    require<CorruptCheckpoint>(
        !name.empty() && name.size() <= kMaxTensorName && name.find('\0') == std::string::npos,
        "{}: a tensor name is empty, contains a NUL, or is longer than {} bytes", json.where(),
        kMaxTensorName);
    try {
      tensors.emplace(name, parse_tensor(json.at(name), index));
    } catch (const CorruptTensor& error) {
      throw CorruptTensor(full_name(section, name), error.begin(), error.end(), error.what());
    } catch (const CorruptCheckpoint& error) {
      throw CorruptTensor(full_name(section, name), 0, 0, error.what());
    }
  }
  return tensors;
}

// Checks that two state tensors belong to the same weights or to different ones, as those of two
// optimizers do, and have their shapes, or one dim: a value for each block of elements. Frozen weights
// have none. The moving average is of the weights of all optimizers.
void check_optimizer(const CheckpointIndex& index, const std::string& source) {
  const auto& states = index.optimizer->state;
  const auto fits = [](const Shape& state, const Shape& weight) {
    return state == weight || (state.size() == 1 && state[0] <= numel(weight));
  };
  const auto check_within = [&](const std::string& state, const TensorMap& tensors,
                                const TensorMap& others, const std::string& where) {
    for (const auto& [name, tensor] : tensors) {
      const auto other = others.find(name);
      require<CorruptCheckpoint>(other != others.end(),
                                 "{}: optimizer/{} of {} has no counterpart in {}", source, state,
                                 name, where);
      require<CorruptCheckpoint>(
          fits(tensor.shape, other->second.shape) || fits(other->second.shape, tensor.shape),
          "{}: optimizer/{} of {} has shape {}, but {} in {}", source, state, name, tensor.shape,
          other->second.shape, where);
    }
  };
  for (const auto& [state, tensors] : states) {
    if (index.model) check_within(state, tensors, *index.model, "the model");
    if (state == kAverageSection.state) continue;
    for (const auto& [other, in_other] : states) {
      const bool apart = std::ranges::none_of(
          tensors, [&](const auto& entry) { return in_other.contains(entry.first); });
      if (!apart || other == kAverageSection.state)
        check_within(state, tensors, in_other, "optimizer/" + other);
    }
  }
}

// "2026-01-31T12:00:00Z"
bool is_time(std::string_view text) {
  constexpr std::string_view kForm = "0000-00-00T00:00:00Z";
  return std::equal(text.begin(), text.end(), kForm.begin(), kForm.end(), [](char c, char form) {
    return form == '0' ? c >= '0' && c <= '9' : c == form;
  });
}

}  // namespace

bool is_state_name(std::string_view name) {
  return !name.empty() && name.size() <= 100 && std::ranges::all_of(name, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  });
}

std::vector<Section> CheckpointIndex::tensor_sections() const {
  std::vector<Section> sections;
  if (model) sections.push_back(kModelSection);
  if (optimizer)
    for (const auto& [name, tensors] : optimizer->state) sections.push_back({name});
  return sections;
}

const TensorMap* CheckpointIndex::tensors(const Section& section) const {
  if (section.is_model()) return model ? &*model : nullptr;
  if (!optimizer) return nullptr;
  const auto found = optimizer->state.find(section.state);
  return found == optimizer->state.end() ? nullptr : &found->second;
}

TensorMap* CheckpointIndex::tensors(const Section& section) {
  return const_cast<TensorMap*>(std::as_const(*this).tensors(section));
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

bool is_run_id(std::string_view text) {
  return !text.empty() && text.size() <= 100 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_' || c == '-';
  });
}

Json tensors_to_json(const TensorMap& tensors) {
  Json json = Json::object();
  for (const auto& [name, tensor] : tensors) {
    Json chunks = Json::array();
    for (const Chunk& chunk : tensor.chunks) {
      Json entry{{"file", chunk.file},
                 {"bytes", {chunk.byte_begin, chunk.byte_end}},
                 {"elements", {chunk.begin, chunk.end}},
                 {"checksum", format_checksum(chunk.crc64)}};
      if (chunk.box) {
        entry["box"] = {{"offsets", shape_to_json(chunk.box->offsets)},
                        {"shape", shape_to_json(chunk.box->shape)}};
      }
      chunks.push_back(std::move(entry));
    }
    json[name] = {{"dtype", safetensors_dtype_name(tensor.dtype)},
                  {"shape", shape_to_json(tensor.shape)},
                  {"chunks", std::move(chunks)}};
  }
  return json;
}

void add_chunks(TensorRecord& tensor, const std::string& file, std::int64_t offset,
                std::int64_t begin, std::int64_t end, std::int64_t chunk_elements,
                const std::vector<std::uint64_t>& crcs) {
  for (const std::uint64_t crc : crcs) {
    Chunk& chunk = tensor.chunks.emplace_back();
    chunk.file = file;
    chunk.begin = begin;
    chunk.end = begin = std::min(begin + chunk_elements, end);
    chunk.byte_begin = offset;
    offset += (chunk.end - chunk.begin) * tensor.width();
    chunk.byte_end = offset;
    chunk.crc64 = crc;
  }
}

CheckpointIndex parse_index(std::string_view text, const std::string& source) {
  const bool checked = check_text(text, source);
  const Json json = parse_json(text, source);
  const JsonReader root(json, source);
  check_version(root, source);
  require<CorruptCheckpoint>(
      checked || !root.has("checksum"),
      "{} was rewritten by another program, so its checksum cannot be verified; remove the field "
      "\"checksum\" to read it without verification",
      source);
  for (const auto& [field, value] : root.object().items()) {
    require<CorruptCheckpoint>(
        checked || std::ranges::find(kUncheckedFields, field) != kUncheckedFields.end(),
        "{}: unknown field {} in an index without a checksum", source, Json(field).dump());
  }
  CheckpointIndex index;
  index.step = root.at("step").integer();
  index.world_size = static_cast<int>(root.at("world_size").integer(1, kMaxWorldSize));
  index.run_id = root.at("run_id").string();
  require<CorruptCheckpoint>(is_run_id(index.run_id),
                             "{}: run_id {}: expected 1 to 100 letters, digits, '.', '_' or '-'",
                             source, root.at("run_id").value().dump());
  index.created = root.at("created").string();
  require<CorruptCheckpoint>(is_time(index.created),
                             "{}: created {}: expected a time like \"2026-01-31T12:00:00Z\"",
                             source, root.at("created").value().dump());
  index.tessera_version = root.at("tessera").string();
  index.model_config = root.at("model").object().dump();
  const JsonReader files = root.at("files");
  for (const auto& [name, value] : files.object().items()) {
    parse_file_name(JsonReader(Json(name), files.where()));
    const JsonReader file = files.at(name);
    const std::int64_t size = file.at("size").integer();
    index.files[name] = size;
    if (!file.has("header")) continue;
    const JsonReader header = file.at("header");
    index.headers[name] = {header.at("size").integer(0, size), parse_crc(header.at("checksum"))};
  }
  const JsonReader sections = root.at("sections");
  if (sections.has("model")) {
    index.model = parse_tensors(sections.at("model").at("tensors"), index, kModelSection);
  }
  if (sections.has("optimizer")) {
    const JsonReader optimizer = sections.at("optimizer");
    const JsonReader tensors = optimizer.at("tensors");
    index.optimizer = OptimizerSection{optimizer.at("hyper").at("step").integer(), {}};
    for (const auto& [state, value] : tensors.object().items()) {
      require<CorruptCheckpoint>(is_state_name(state),
                                 "{}: state {}: expected 1 to 100 letters, digits or '_'",
                                 tensors.where(), Json(state).dump());
      index.optimizer->state[state] = parse_tensors(tensors.at(state), index, {state});
    }
    check_optimizer(index, source);
  }
  if (sections.has("trainer")) {
    const JsonReader trainer = sections.at("trainer");
    index.trainer = TrainerSection{parse_file_name(trainer.at("file")),
                                   trainer.at("size").integer(), parse_crc(trainer.at("checksum"))};
  }
  return index;
}

std::string format_index(const CheckpointIndex& index) {
  Json files = Json::object();
  for (const auto& [name, size] : index.files) files[name] = {{"size", size}};
  for (const auto& [name, header] : index.headers) {
    files[name]["header"] = {{"size", header.size}, {"checksum", format_checksum(header.crc64)}};
  }
  Json sections = Json::object();
  if (index.model) sections["model"] = {{"tensors", tensors_to_json(*index.model)}};
  if (index.optimizer) {
    Json states = Json::object();
    for (const auto& [state, tensors] : index.optimizer->state)
      states[state] = tensors_to_json(tensors);
    sections["optimizer"] = {{"hyper", {{"step", index.optimizer->step}}},
                             {"tensors", std::move(states)}};
  }
  if (index.trainer) {
    sections["trainer"] = {{"file", index.trainer->file},
                           {"size", index.trainer->size},
                           {"checksum", format_checksum(index.trainer->crc64)}};
  }
  // The checksum comes first, because the JSON library sorts keys.
  const Json json{{"checksum", fmt::format("crc64:{}", kNoDigits)},
                  {"format", kCheckpointFormat},
                  {"version", kCheckpointVersion},
                  {"step", index.step},
                  {"world_size", index.world_size},
                  {"run_id", index.run_id},
                  {"created", index.created},
                  {"tessera", index.tessera_version},
                  {"model", Json::parse(index.model_config)},
                  {"files", std::move(files)},
                  {"sections", std::move(sections)}};
  std::string text = json.dump(1) + "\n";
  require<InternalError>(text.starts_with(kChecksumStart), "the index begins with \"{}\"",
                         text.substr(0, kChecksumStart.size()));
  const std::string checksum = format_checksum(index_checksum(text));
  text.replace(kChecksumStart.size(), kNoDigits.size(), checksum,
               checksum.size() - kNoDigits.size());
  return text;
}

}  // namespace tessera::io
