// A checkpoint's trainer.json, and the model section of an index's configuration.
#include "train/trainer_state.h"

#include <nlohmann/json.hpp>
#include <string>

#include "models/arch.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(trainer_state, "trainer_state") {
  fuzz::try_parse([&] {
    const train::TrainerState state =
        train::parse_trainer_state(std::string(fuzz::text_of(data, size)), "trainer.json");
    // An accepted state survives format and parse.
    const std::string text = train::format_trainer_state(state);
    fuzz::expect(train::format_trainer_state(train::parse_trainer_state(text, "again")) == text);
    const auto config = nlohmann::json::parse(state.config);
    if (!config.is_object() || !config.contains("model")) return;
    const std::string arch =
        models::to_json(models::parse_arch(config.at("model").dump(), "trainer.json"));
    fuzz::expect(models::to_json(models::parse_arch(arch, "again")) == arch);
  });
  return 0;
}
