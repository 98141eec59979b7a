#include "io/source/other_formats.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/consolidate.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("formats that are not read are named, with advice") {
  struct Row {
    const char* file;  // below the directory
    const char* message;
  };
  const Row rows[] = {
      {"mp_rank_01/model_optim_rng.pt",
       "holds a Megatron checkpoint of the format torch, which has a "
       "file for each rank: write it again with Megatron's"},
      {"_CHECKPOINT_METADATA", "holds a checkpoint of Orbax (JAX): restore it"},
      {"3/_CHECKPOINT_METADATA", "holds a checkpoint of Orbax (JAX): restore it"},
      {"default/manifest.ocdbt", "holds a checkpoint of Orbax (JAX): restore it"},
      {"params.kernel/.zarray", "holds a directory of zarr arrays: if Megatron wrote it"},
      {"model_index.json", "holds a pipeline of diffusers: its models"},
      {"ckpt-1.data-00000-of-00002", "holds a checkpoint of TensorFlow: open it"},
      {"flax_model.msgpack", "holds parameters of Flax: open them"},
      {"tf_model.h5", "holds a model of Keras: open"},
      {"model.onnx", "holds an ONNX model: give"},
      {"weights.npz", "holds arrays of NumPy: write them"},
      {"model.pkl", "holds a pickle of Python: opening it may run any code"},
      {"model-Q8_0.gguf", "holds GGUF files, or one that is damaged: give"},
      {"model-00002-of-00009.safetensors",
       "holds shards of a Hugging Face model without their index"},
      {"random_states_0.pkl", "holds random states of accelerate, but no weights"},
      {"adapter.safetensors", "holds safetensors of another name: give"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.file);
    const TempDir dir;
    const fs::path file = dir.path() / row.file;
    fs::create_directories(file.parent_path());
    dir.write(row.file, "");
    CHECK_THROWS_HOLDING(Unsupported, row.message, open_checkpoint(dir.path()));
    CHECK_THROWS_HOLDING(Unsupported, row.message, consolidate(dir.path(), dir.path() / "out"));
    CHECK_FALSE(fs::exists(dir.path() / "out"));
    if (file.parent_path() == dir.path() && file.extension() != ".gguf")
      CHECK_THROWS_HOLDING(Unsupported, row.message, consolidate(file, dir.path() / "out"));
  }
  const TempDir dir;
  dir.write("readme.txt", "");
  CHECK(describe_other_format(dir.path()).empty());
  dir.write("rank-00000-of-00001.safetensors", "");
  CHECK(describe_other_format(dir.path()).empty());
  CHECK(describe_other_format(dir.path() / "absent").empty());
}

}  // namespace
}  // namespace tessera::io
