#pragma once

#include <string>

#include "io/base/option_texts.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tessera::tools {

/// Adds an option, an option that may be repeated, an integer, or a switch, of which the last one
/// counts, for option_texts() to collect.
CLI::Option* add_text(CLI::App& app, const std::string& name, const std::string& help);
CLI::Option* add_texts(CLI::App& app, const std::string& name, const std::string& help);
CLI::Option* add_integer(CLI::App& app, const std::string& name, const std::string& help);
void add_switch(CLI::App& app, const std::string& name, const std::string& help);

/// All options and switches of the command line, by their long names.
io::OptionTexts option_texts(const CLI::App& app);

/// Adds --strip, --rename, --select and --exclude, which io::name_rules reads.
void add_name_rules(CLI::App& app);

}  // namespace tessera::tools
