// A safetensors shard of a PyTorch Distributed Checkpoint.
#include <filesystem>
#include <fstream>

#include "io/dcp/dcp_source.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
namespace fs = std::filesystem;

TESSERA_FUZZ_TARGET(dcp_safetensors, "dcp_safetensors") {
  static const fs::path dir =
      fs::path("/dev/shm") / ("tessera-fuzz-dcp-safetensors-" + std::to_string(::getpid()));
  fs::create_directories(dir);
  std::ofstream(dir / "shard-00001-model-00001-of-00001.safetensors", std::ios::binary)
      << fuzz::text_of(data, size);
  fuzz::try_parse([&] {
    const auto source = io::open_dcp_safetensors(dir);
    for (const auto& tensor : source->tensors()) {
      // No tensor is larger than the file.
      fuzz::expect(numel(tensor.shape) <= static_cast<std::int64_t>(size));
    }
  });
  fs::remove_all(dir);
  return 0;
}
