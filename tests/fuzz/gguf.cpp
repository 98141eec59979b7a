// The header of a GGUF file, and the config.json and tokenizer made of its keys.
#include <nlohmann/json.hpp>

#include "io/gguf/source.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(gguf, "gguf") {
  static const fuzz::InputFile file;
  const std::string path = file.write(data, size);
  fuzz::try_parse([&] {
    const io::File opened = io::File::open(path);
    const io::GgufHeader header = io::read_gguf_header(opened);
    std::int64_t at = 0;
    for (const io::GgufEntry& entry : header.tensors) {
      fuzz::expect(entry.begin >= at && entry.end >= entry.begin &&
                   entry.end <= static_cast<std::int64_t>(size));
      at = entry.end;
    }
    fuzz::try_parse([&] {
      std::vector<std::string> warnings;
      io::gguf_tokenizer(opened, header, warnings);
    });
    const io::GgufSource source(path);
    for (const io::TensorInfo& tensor : source.tensors()) source.record(tensor.name);
    io::gguf_config(source);
  });
  return 0;
}
