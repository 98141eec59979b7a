#include "io/hf/model_source.h"

#include "core/base/error.h"
#include "io/checkpoint/find.h"

namespace tessera::io {
namespace {

class CheckpointSource final : public ModelSource {
 public:
  explicit CheckpointSource(CheckpointReader reader) : reader_(std::move(reader)) {
    for (const auto& [name, record] : reader_.tensors(Section::Model)) {
      tensors_.push_back({name, record.shape, record.dtype});
    }
    match_tensors(gpt2_tensors(config()), tensors_, reader_.path().string());
  }
  const Json& config() const override { return reader_.index().model_config; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const override {
    reader_.read(Section::Model, name, begin, end, out, dtype);
  }
  void stream(const std::string& name, std::size_t buffer_bytes,
              const CheckpointReader::Sink& sink) const override {
    reader_.stream(Section::Model, name, buffer_bytes, sink);
  }
  const fs::path& path() const override { return reader_.path(); }
  const CheckpointReader* checkpoint() const override { return &reader_; }

 private:
  CheckpointReader reader_;
  std::vector<TensorInfo> tensors_;
};

}  // namespace

std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step) {
  std::error_code error;
  require<IoError>(fs::exists(path, error), "{} does not exist", path.string());
  require(fs::is_directory(path, error),
          "{} is a file; name a checkpoint, a run, or the directory of a Hugging Face model",
          path.string());
  // A run has a config.json too: its model directory is told apart by the weights beside it.
  if (fs::exists(path / "model.safetensors", error) ||
      fs::exists(path / "model.safetensors.index.json", error)) {
    require(!step, "{} is a Hugging Face model and has no step {}", path.string(),
            step.value_or(0));
    return open_hf_model(path);
  }
  return std::make_unique<CheckpointSource>(open_checkpoint(path, step));
}

}  // namespace tessera::io
