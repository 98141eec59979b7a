#include "io/checkpoint/merge_index.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {

IndexMerger::IndexMerger(CheckpointIndex frame)
    : frame_(std::move(frame)),
      files_(std::make_shared<Json>(Json::object())),
      tensors_(std::make_shared<Json>(Json::object())) {}

void IndexMerger::add(const std::string& shard, std::int64_t shard_bytes, std::string_view text,
                      const std::string& source) {
  const Json part = parse_json(text, source);
  const JsonReader root(part, source);
  (*files_)[shard] = {{"size", shard_bytes}, {"header", root.at("header").object()}};
  const JsonReader sections = root.at("sections");
  for (const auto& [section, names] : sections.object().items()) {
    const JsonReader tensors = sections.at(section);
    for (const auto& [name, tensor] : tensors.object().items()) {
      const JsonReader reader = tensors.at(name);
      const JsonReader dtype = reader.at("dtype"), shape = reader.at("shape");
      const JsonReader chunks = reader.at("chunks");
      const std::size_t count = chunks.array_size();
      Json& whole = (*tensors_)[section][name];
      if (whole.is_null()) {
        whole = tensor;
        continue;
      }
      require<CorruptCheckpoint>(whole["dtype"] == dtype.value() && whole["shape"] == shape.value(),
                                 "{}: {}/{} is {}{}, but {}{} in a lower rank", source, section,
                                 name, dtype.value().dump(), shape.value().dump(),
                                 whole["dtype"].dump(), whole["shape"].dump());
      for (std::size_t i = 0; i < count; ++i) whole["chunks"].push_back(chunks.at(i).value());
    }
  }
}

std::string IndexMerger::finish(const std::string& source) const {
  const auto take = [&](Section section) {
    const auto found = tensors_->find(std::string(section_name(section)));
    return found == tensors_->end() ? Json::object() : *found;
  };
  Json json = Json::parse(format_index(frame_));
  json.erase("checksum");  // covers the frame only; format_index adds the final one
  json["files"] = *files_;
  json["sections"]["model"] = {{"tensors", take(Section::Model)}};
  const Json exp_avg = take(Section::ExpAvg), exp_avg_sq = take(Section::ExpAvgSq);
  if (!exp_avg.empty() || !exp_avg_sq.empty()) {
    json["sections"]["optimizer"] = {
        {"hyper", {{"step", frame_.step}}},
        {"tensors", {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}}};
  }
  return format_index(parse_index(json.dump(), source));
}

}  // namespace tessera::io
