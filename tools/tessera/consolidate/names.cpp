#include "tools/tessera/consolidate/names.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

namespace tessera::tools {
namespace {

/// Accepts the spellings that CLI11 does for a T, such as 0x4 or yes, and writes them as 4 or true.
template <typename T>
CLI::Validator spelled_as(const char* expected) {
  return CLI::Validator(
      [expected](std::string& text) {
        T value{};
        if (!CLI::detail::lexical_cast(text, value))
          return fmt::format("\"{}\" is not {}", text, expected);
        text = fmt::format("{}", value);
        return std::string();
      },
      "");
}

}  // namespace

CLI::Option* add_text(CLI::App& app, const std::string& name, const std::string& help) {
  return app.add_option(name, CLI::callback_t(), help)->type_name("TEXT");
}

CLI::Option* add_texts(CLI::App& app, const std::string& name, const std::string& help) {
  return add_text(app, name, help)->expected(1, CLI::detail::expected_max_vector_size);
}

CLI::Option* add_integer(CLI::App& app, const std::string& name, const std::string& help) {
  return add_text(app, name, help)
      ->type_name("INT")
      ->transform(spelled_as<int>("an integer of 32 bits"));
}

void add_switch(CLI::App& app, const std::string& name, const std::string& help) {
  app.add_flag(name, help)->transform(spelled_as<bool>("true or false"));
}

io::OptionTexts option_texts(const CLI::App& app) {
  io::OptionTexts texts;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& value : option->reduced_results())
      if (!option->get_lnames().empty()) texts.add(option->get_lnames()[0], value);
  return texts;
}

void add_name_rules(CLI::App& app) {
  add_texts(app, "--strip",
            "What to remove from names in other programs' shards: auto (parts that wrappers "
            "add, keys of the saved dict, and any prefix before the names of the model), "
            "none, or a prefix such as model. (may be repeated)")
      ->default_str("[auto]");
  add_texts(app, "--rename",
            "Change names in other programs' shards, after --strip: 's/OLD/NEW/' with an "
            "ECMAScript expression OLD, and $1 in NEW (may be repeated)");
  add_texts(app, "--select",
            "Take only weights whose name in the shards matches this pattern, such as "
            "'ema.*', and their moments (may be repeated)");
  add_texts(app, "--exclude",
            "Leave out weights whose name in the shards matches this pattern, and their "
            "moments (may be repeated)");
}

}  // namespace tessera::tools
