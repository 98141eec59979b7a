#include "io/checkpoint/merge_index.h"

#include "core/base/error.h"

namespace tessera::io {

void IndexMerger::add(const std::string& shard, std::string_view text, const std::string& source) {
  const Json part = parse_json(text, source);
  const JsonReader root(part, source);
  files[shard] = {{"size", root.at("size").value()}, {"header", root.at("header").object()}};
  const JsonReader parts = root.at("sections");
  for (const auto& [section, names] : parts.object().items()) {
    const JsonReader tensors = parts.at(section);
    for (const auto& [name, tensor] : tensors.object().items()) {
      const JsonReader reader = tensors.at(name);
      const Json &dtype = reader.at("dtype").value(), &shape = reader.at("shape").value();
      const JsonReader chunks = reader.at("chunks");
      const std::size_t count = chunks.array_size();
      Json& whole = tensors_[section][name];
      if (whole.is_null()) {
        whole = tensor;
        continue;
      }
      require<CorruptCheckpoint>(whole["dtype"] == dtype && whole["shape"] == shape,
                                 "{}: {}/{} is {}{}, but {}{} in a lower rank", source, section,
                                 name, dtype.dump(), shape.dump(), whole["dtype"].dump(),
                                 whole["shape"].dump());
      for (std::size_t i = 0; i < count; ++i) whole["chunks"].push_back(chunks.at(i).value());
    }
  }
}

CheckpointIndex IndexMerger::finish(const CheckpointIndex& frame, const std::string& source) {
  sections["model"] = {{"tensors", Json::object()}};
  for (const auto& item : tensors_.items()) {
    const std::string& name = item.key();
    Json& tensors = item.value();
    constexpr std::string_view kOptimizer = "optimizer/";
    if (name == kModelSection.name()) {
      sections["model"]["tensors"] = std::move(tensors);
    } else if (name.starts_with(kOptimizer)) {
      sections["optimizer"]["hyper"]["step"] = frame.step;
      sections["optimizer"]["tensors"][name.substr(kOptimizer.size())] = std::move(tensors);
    }
  }
  Json json = Json::parse(format_index(frame));
  // Parses without the checksum, because it is over the frame only.
  json.erase("checksum");
  json["files"] = std::move(files);
  json["sections"] = std::move(sections);
  return parse_index(json.dump(), source);
}

}  // namespace tessera::io
