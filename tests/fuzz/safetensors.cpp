#include "io/safetensors/header.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(safetensors, "safetensors") {
  static const fuzz::InputFile file;
  const std::string path = file.write(data, size);
  fuzz::try_parse([&] {
    const auto header = io::read_safetensors_header(io::File::open(path));
    // Every byte of the data belongs to exactly one tensor.
    std::int64_t at = header.tensors.empty() ? header.file_size : header.tensors.front().begin;
    for (const auto& tensor : header.tensors) {
      fuzz::expect(tensor.begin == at && tensor.end >= tensor.begin);
      at = tensor.end;
    }
    fuzz::expect(at == static_cast<std::int64_t>(size) && header.file_size == at);
  });
  return 0;
}
