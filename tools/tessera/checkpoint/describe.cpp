#include "tools/tessera/checkpoint/describe.h"

#include <nlohmann/json.hpp>

#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/safetensors/dtype.h"

namespace tessera::tools {

std::vector<std::string> section_names(const io::CheckpointIndex& index) {
  std::vector<std::string> names;
  if (index.model) names.emplace_back("model");
  if (index.optimizer) names.emplace_back("optimizer");
  if (index.trainer) names.emplace_back("trainer");
  return names;
}

std::int64_t stored_bytes(const io::CheckpointIndex& index) {
  std::int64_t bytes = index.trainer ? index.trainer->size : 0;
  for (const auto& [name, size] : index.files) bytes += size;
  return bytes;
}

std::int64_t parameter_count(const io::CheckpointIndex& index) {
  std::int64_t count = 0;
  if (index.model) {
    for (const auto& [name, tensor] : *index.model) count += numel(tensor.shape);
  }
  return count;
}

namespace {

io::Json list(const Shape& shape) { return std::vector<std::int64_t>(shape.begin(), shape.end()); }

io::Json describe_place(const io::Chunk& chunk) {
  io::Json place{{"file", chunk.file},
                 {"bytes", {chunk.byte_begin, chunk.byte_end}},
                 {"elements", {chunk.begin, chunk.end}},
                 {"checksum", io::format_checksum(chunk.crc64)}};
  if (chunk.box)
    place["box"] = {{"offsets", list(chunk.box->offsets)}, {"shape", list(chunk.box->shape)}};
  return place;
}

io::Json describe_tensors(const io::TensorMap& tensors, io::Section section, bool with_places) {
  io::Json described = io::Json::object();
  for (const auto& [name, tensor] : tensors) {
    io::Json entry{{"section", io::section_name(section)},
                   {"dtype", io::safetensors_dtype_name(tensor.dtype)},
                   {"shape", list(tensor.shape)},
                   {"chunks", tensor.chunks.size()}};
    if (const auto crc = io::tensor_checksum(tensor)) {
      entry["checksum"] = io::format_checksum(*crc);
    }
    if (with_places) {
      entry["places"] = io::Json::array();
      for (const io::Chunk& chunk : tensor.chunks) entry["places"].push_back(describe_place(chunk));
    }
    described[name] = std::move(entry);
  }
  return described;
}

}  // namespace

io::Json describe_checkpoint(const io::CheckpointReader& reader, bool with_places) {
  const io::CheckpointIndex& index = reader.index();
  io::Json tensors = io::Json::object();
  if (index.model) tensors = describe_tensors(*index.model, io::Section::Model, with_places);
  io::Json optimizer, configuration, problem;
  if (index.optimizer) {
    optimizer = {{"step", index.optimizer->step}, {"tensors", index.optimizer->exp_avg.size()}};
  }
  if (index.optimizer && with_places) {
    for (const auto& [name, section] :
         {std::pair("exp_avg", io::Section::ExpAvg), {"exp_avg_sq", io::Section::ExpAvgSq}})
      optimizer[name] = describe_tensors(*index.tensors(section), section, with_places);
  }
  if (index.trainer) {
    try {
      const std::string source = (reader.path() / index.trainer->file).string();
      const io::Json trainer = io::parse_json(reader.trainer_json(), source);
      if (trainer.is_object() && trainer.contains("config")) configuration = trainer["config"];
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  return {{"path", reader.path().string()},
          {"step", index.step},
          {"world_size", index.world_size},
          {"run_id", index.run_id},
          {"created", index.created},
          {"tessera", index.tessera_version},
          {"format_version", io::kCheckpointVersion},
          {"sections", section_names(index)},
          {"digest", index.model ? io::Json(reader.digest()) : io::Json(nullptr)},
          {"parameters", parameter_count(index)},
          {"bytes", stored_bytes(index)},
          {"files", index.files},
          {"model", io::Json::parse(index.model_config)},
          {"tensors", std::move(tensors)},
          {"optimizer", std::move(optimizer)},
          {"configuration", std::move(configuration)},
          {"trainer_problem", std::move(problem)}};
}

}  // namespace tessera::tools
