#include "io/hf/model_source.h"

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/source/checkpoint_tensors.h"

namespace tessera::io {
namespace {

class CheckpointSource final : public ModelSource {
 public:
  explicit CheckpointSource(const CheckpointReader& reader)
      : reader_(reader), weights_(reader, Section::Model) {
    match_tensors(gpt2_tensors(config()), tensors(), path().string());
  }
  const Json& config() const override { return reader_.index().model_config; }
  const CheckpointReader* checkpoint() const override { return &reader_; }

  const fs::path& path() const override { return weights_.path(); }
  const std::vector<TensorInfo>& tensors() const override { return weights_.tensors(); }
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const override {
    weights_.read(name, begin, end, out, dtype);
  }
  void stream(const std::string& name, std::size_t buffer_bytes, const Sink& sink) const override {
    weights_.stream(name, buffer_bytes, sink);
  }
  std::optional<TensorLayout> layout(const std::string& name) const override {
    return weights_.layout(name);
  }
  File open_file(const std::string& name) const override { return weights_.open_file(name); }

 private:
  CheckpointReader reader_;
  CheckpointTensors weights_;
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
