// model.safetensors.index.json, next to one file with the tensors "a" and "b".
#include <filesystem>
#include <fstream>

#include "io/safetensors/directory.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
namespace fs = std::filesystem;

namespace {

fs::path make_directory() {
  const fs::path dir =
      fs::path("/dev/shm") / ("tessera-fuzz-hf-index-" + std::to_string(::getpid()));
  fs::create_directories(dir);
  std::string header = R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                       R"("b":{"dtype":"F32","shape":[],"data_offsets":[3,7]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream file(dir / "one.safetensors", std::ios::binary);
  file.put(static_cast<char>(header.size()));
  file << std::string(7, '\0') << header << "1234567";
  return dir;
}

}  // namespace

TESSERA_FUZZ_TARGET(hf_index, "hf_index") {
  const fs::path dir = make_directory();
  std::ofstream(dir / "model.safetensors.index.json", std::ios::binary)
      << fuzz::text_of(data, size);
  fuzz::try_parse([&] {
    const auto source = io::open_safetensors_directory(dir);
    for (const auto& tensor : source->tensors())
      fuzz::expect(tensor.name == "a" || tensor.name == "b");
  });
  fs::remove_all(dir);
  return 0;
}
