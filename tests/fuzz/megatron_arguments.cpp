// The pickle of Megatron's common.pt, which holds its arguments.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/megatron/arguments.h"
#include "tests/fuzz/fuzz.h"
#include "tests/io/dcp/bytes.h"

using namespace tessera;
namespace fs = std::filesystem;

TESSERA_FUZZ_TARGET(megatron_arguments, "megatron_arguments") {
  const fs::path dir =
      fs::path("/dev/shm") / ("tessera-fuzz-megatron-" + std::to_string(::getpid()));
  fs::create_directories(dir);
  test::ZipFile file;
  file.parts.push_back({"a/data.pkl", std::string(fuzz::text_of(data, size))});
  for (int i = 0; i < 8; ++i)
    file.parts.push_back({"a/data/" + std::to_string(i), std::string(16, 'x')});
  std::ofstream(dir / "common.pt", std::ios::binary) << file.bytes();
  const io::Json config{{"model_type", "llama"},    {"num_attention_heads", 4},
                        {"num_key_value_heads", 2}, {"num_hidden_layers", 2},
                        {"vocab_size", 100},        {"hidden_size", 8}};
  fuzz::try_parse([&] {
    for (const std::string& warning : io::check_megatron_arguments(dir, config))
      fuzz::expect(!warning.empty());
  });
  fs::remove_all(dir);
  return 0;
}
