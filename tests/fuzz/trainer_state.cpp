// A checkpoint's trainer.json, and the model section of an index's configuration.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/fuzz/fuzz.h"
#include "tools/tessera/train/checkpoints.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(trainer_state, "trainer_state") {
  fuzz::try_parse([&] {
    const tools::TrainerState state =
        tools::parse_trainer_state(std::string(fuzz::text_of(data, size)), "trainer.json");
    // An accepted state survives format and parse.
    const std::string text = tools::format_trainer_state(state);
    fuzz::expect(tools::format_trainer_state(tools::parse_trainer_state(text, "again")) == text);
    const auto config = nlohmann::json::parse(state.config);
    if (!config.is_object() || !config.contains("model")) return;
    const auto model =
        tools::model_section(tools::parse_model_section(config.at("model"), "trainer.json"));
    fuzz::expect(tools::model_section(tools::parse_model_section(model, "again")) == model);
  });
  return 0;
}
