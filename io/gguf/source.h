#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/gguf/header.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// The tensors of a GGUF file under its names. Those in Q8_0 are the bytes of their blocks, as U8.
class GgufSource final : public TensorSource {
 public:
  /// @throws as read_gguf_header; Unsupported naming a tensor of another quantization
  explicit GgufSource(const fs::path& file);

  const GgufHeader& header() const { return header_; }
  const GgufEntry* find(const std::string& name) const;

  const fs::path& path() const override { return dir_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;

 private:
  const fs::path dir_;
  const std::string file_;
  GgufHeader header_;
  std::map<std::string, const GgufEntry*> entries_;
  std::vector<TensorInfo> tensors_;
};

/// config.json of a model from the keys of its GGUF file: of the architectures llama, qwen2 and qwen3.
/// @throws Unsupported naming an architecture or setting that the keys do not give completely
Json gguf_config(const GgufSource& source);

/// tokenizer.json, tokenizer_config.json and chat_template.jinja from the keys of a GGUF file.
/// @param warnings  receives the reason why there are none
/// @throws CorruptCheckpoint on malformed keys, duplicate tokens, and more tokens than embeddings
std::map<std::string, std::string> gguf_tokenizer(const File& file, const GgufHeader& header,
                                                  std::vector<std::string>& warnings);

}  // namespace tessera::io
