// adapter_config.json, and behind a NUL the header of adapter_model.safetensors with 320 bytes of data.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/hf/lora.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
namespace fs = std::filesystem;

TESSERA_FUZZ_TARGET(peft, "peft") {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t cut = std::min(input.find('\0'), size);
  const std::string header(input.substr(std::min(cut + 1, size)));
  const fs::path dir = fs::path("/dev/shm") / ("tessera-fuzz-peft-" + std::to_string(::getpid()));
  fs::create_directories(dir);
  std::ofstream(dir / "adapter_config.json", std::ios::binary) << input.substr(0, cut);
  const std::uint64_t bytes = header.size();
  std::ofstream(dir / "adapter_model.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) << header
      << std::string(320, '\1');
  const io::Json model{{"arch", "llama"}, {"n_layer", 1},  {"n_head", 2},      {"n_kv_head", 1},
                       {"n_embd", 8},     {"n_inner", 16}, {"vocab_size", 11}, {"seq_len", 16}};
  fuzz::try_parse([&] {
    const io::PeftAdapter adapter = io::open_peft(dir, model);
    fuzz::expect(adapter.layers.size() == adapter.scales.size());
    for (const io::TensorInfo& tensor : adapter.source->tensors()) {
      std::string values(static_cast<std::size_t>(numel(tensor.shape)) * 4, '\0');
      adapter.source->read(tensor.name, 0, numel(tensor.shape), values.data(), DType::F32);
    }
  });
  fs::remove_all(dir);
  return 0;
}
