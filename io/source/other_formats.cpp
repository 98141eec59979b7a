#include "io/source/other_formats.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {
namespace {

struct OtherFormat {
  /// Paths relative to the directory, separated by spaces; `*` and `?` match in their parts.
  std::string_view patterns;
  std::string_view name, advice;
};

// The first that matches is named.
constexpr OtherFormat kOtherFormats[] = {
    {"metrics.jsonl rank-*-of-*.safetensors", "", ""},  // tessera's own
    {"model-*-of-*.safetensors pytorch_model-*-of-*.bin",
     "shards of a Hugging Face model without their index",
     "give their directory, with model.safetensors.index.json or pytorch_model.bin.index.json in "
     "it"},
    {"mp_rank_*/model_optim_rng.pt",
     "a Megatron checkpoint of the format torch, which has a file for each rank",
     "write it again with Megatron's --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and "
     "give that"},
    {"_CHECKPOINT_METADATA manifest.ocdbt _METADATA */_CHECKPOINT_METADATA */manifest.ocdbt "
     "*/_METADATA",
     "a checkpoint of Orbax (JAX)",
     "restore it in Python with orbax.checkpoint.PyTreeCheckpointer().restore(DIR), and write its "
     "arrays as model.safetensors with safetensors.numpy.save_file"},
    {".zarray .zgroup zarr.json */.zarray */.zgroup */zarr.json", "a directory of zarr arrays",
     "if Megatron wrote it, write it again with --ckpt-convert-format torch_dist "
     "--ckpt-convert-save DIR; else write the arrays as model.safetensors with "
     "safetensors.numpy.save_file"},
    {"model_index.json", "a pipeline of diffusers",
     "its models are in folders of their own; tessera takes one whose file is named "
     "model.safetensors, not diffusion_pytorch_model.safetensors"},
    {"*.data-00000-of-?????", "a checkpoint of TensorFlow",
     "open it with transformers 4 by from_pretrained(DIR, from_tf=True), and save it with "
     "save_pretrained"},
    {"saved_model.pb", "a SavedModel of TensorFlow",
     "give the checkpoint of the weights that it was exported from"},
    {"*.msgpack", "parameters of Flax",
     "open them with transformers 4 by from_pretrained(DIR, from_flax=True), and save them with "
     "save_pretrained"},
    {"*.h5 *.keras", "a model of Keras",
     "open a tf_model.h5 with transformers 4 by from_pretrained(DIR, from_tf=True), another with "
     "Keras, and save its weights as model.safetensors"},
    {"*.ckpt *.pt *.pth *.bin", "files of torch.save",
     "give one of them; `tessera checkpoint list` shows those that have checkpoints"},
    {"*.onnx", "an ONNX model", "give the PyTorch checkpoint that it was exported from"},
    {"*.npz *.npy", "arrays of NumPy",
     "write them as model.safetensors with safetensors.numpy.save_file"},
    {"random_states_*.pkl", "random states of accelerate, but no weights",
     "give the folder with the model, such as pytorch_model_fsdp_0"},
    {"*.pkl *.pickle *.joblib", "a pickle of Python",
     "opening it may run any code, so tessera does not; load it in Python if you trust it, and "
     "save "
     "its tensors with torch.save"},
    {"*.gguf", "GGUF files, or one that is damaged", "give an intact file"},
    {"*.safetensors", "safetensors of another name",
     "give the directory of model.safetensors, or of several with model.safetensors.index.json"},
};

// Whether an entry of `dir` matches the parts of a pattern.
bool has_match(const fs::path& dir, std::string_view pattern) {
  const std::size_t slash = pattern.find('/');
  const std::string first(pattern.substr(0, slash));
  const std::string_view rest = slash < pattern.size() ? pattern.substr(slash + 1) : "";
  const auto matches = [&](const fs::path& path) {
    return ::fnmatch(first.c_str(), path.filename().c_str(), 0) == 0 &&
           (rest.empty() ? is_there(path) : has_match(path, rest));
  };
  if (first.find_first_of("*?") == std::string::npos) return matches(dir / first);
  std::error_code none;
  return std::ranges::any_of(list_directory(dir, none), matches);
}

}  // namespace

std::string describe_other_format(const fs::path& path) {
  std::error_code error;
  const bool is_directory = fs::is_directory(path, error);
  for (const OtherFormat& format : kOtherFormats) {
    std::string_view patterns = format.patterns;
    while (!patterns.empty()) {
      const std::string_view pattern = patterns.substr(0, patterns.find(' '));
      patterns.remove_prefix(std::min(patterns.size(), pattern.size() + 1));
      if (is_directory ? has_match(path, pattern)
                       : ::fnmatch(std::string(pattern).c_str(), path.filename().c_str(), 0) == 0)
        return format.name.empty() ? "" : fmt::format("{}: {}", format.name, format.advice);
    }
  }
  return "";
}

void refuse_other_format(const fs::path& path) {
  const std::string other = describe_other_format(path);
  require<Unsupported>(other.empty(), "{} holds {}", path.string(), other);
}

}  // namespace tessera::io
