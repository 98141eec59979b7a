// trainer.json of a checkpoint, and the model section of the configuration in it, as an index has
// one.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/fuzz/fuzz.h"
#include "tools/tessera/train/checkpoints.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(trainer_state, "trainer_state") {
  fuzz::try_parse([&] {
    const tools::TrainerState state =
        tools::parse_trainer_state(std::string(fuzz::text_of(data, size)), "trainer.json");
    // What is taken can be written, and is the same when it is read again.
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
