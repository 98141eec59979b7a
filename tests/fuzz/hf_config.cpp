#include <nlohmann/json.hpp>

#include "io/hf/model_source.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(hf_config, "hf_config") {
  static const fuzz::InputFile file;
  const std::string path = file.write(data, size);
  fuzz::try_parse([&] { fuzz::expect(io::read_hf_config(path).is_object()); });
  return 0;
}
