#include "tools/tessera/config/config.h"

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz.h"
#include "tools/tessera/config/load.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(config, "config") {
  fuzz::try_parse([&] {
    tools::Config config;
    tools::read_json_config(config, fuzz::text_of(data, size), "run.json");
    const std::string text = tools::to_json(config).dump();
    tools::Config again;
    tools::read_json_config(again, text, "again");
    fuzz::expect(tools::to_json(again).dump() == text);
    config.validate(2);
  });
  return 0;
}
