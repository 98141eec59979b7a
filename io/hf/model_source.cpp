#include "io/hf/model_source.h"

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/hf/gpt2_source.h"
#include "io/source/checkpoint_tensors.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

class CheckpointSource final : public ModelSource {
 public:
  CheckpointSource(const CheckpointReader& reader, LoadPolicy policy)
      : reader_(reader), weights_(reader, Section::Model) {
    if (policy == LoadPolicy::Exact)
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

std::unique_ptr<ModelSource> open_checkpoint_model(const CheckpointReader& reader,
                                                   LoadPolicy policy) {
  return std::make_unique<CheckpointSource>(reader, policy);
}

Json read_hf_config(const fs::path& file) {
  constexpr std::int64_t kMaxJson = std::int64_t{64} << 20;
  return gpt2_config_from_hf(parse_json(read_file(file, kMaxJson), file.string()), file.string());
}

void require_model_directory(const fs::path& path) {
  std::error_code error;
  require<IoError>(fs::exists(path, error), "{} does not exist", path.string());
  require(fs::is_directory(path, error),
          "{} is a file; name a checkpoint, a run, the directory of a Hugging Face model or of a "
          "PyTorch Distributed Checkpoint",
          path.string());
}

std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step,
                                        LoadPolicy policy) {
  require_model_directory(path);
  // A run has a config.json too: other directories are told apart by the weights in them.
  std::unique_ptr<ShardedSource> source = open_sharded(path);
  if (!source) return open_checkpoint_model(open_checkpoint(path, step), policy);
  require(!step, "{} is a {} and has no step {}", path.string(), source->kind(), step.value_or(0));
  const fs::path config = path / "config.json";
  std::error_code error;
  require(fs::exists(config, error),
          "{} is a {} without config.json, so which model it holds is unknown; put the config.json "
          "of the Hugging Face model into it, or `tessera consolidate` it with --config",
          path.string(), source->kind());
  return std::make_unique<Gpt2Source>(std::move(source), read_hf_config(config), NameRules{},
                                      policy);
}

}  // namespace tessera::io
