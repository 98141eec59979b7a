#pragma once

#include <optional>
#include <string>

#include "io/base/file.h"
#include "io/base/json.h"
#include "io/base/option_texts.h"
#include "io/consolidate/consolidate.h"
#include "io/source/names.h"

namespace tessera::io {

/// The options of `tessera consolidate`, whose help describes them, for the program and the C API.
/// Sets neither callbacks nor `partial`. @throws InvalidArgument, also on options that it lacks and
/// that the caller has not read
ConsolidateOptions consolidate_options(const OptionTexts& given);

/// "K/N" of option part. @throws InvalidArgument
ExportShare parse_share(const std::string& text);
/// Options strip, rename, select and exclude.
NameRules name_rules(const OptionTexts& given);
/// Option config, which may be the directory of the file; empty if it is absent.
std::optional<fs::path> config_file(const OptionTexts& given);
/// Option like; empty if it is absent.
std::optional<fs::path> like_directory(const OptionTexts& given);

/// {"source", "kind", "step", "committed", "waiting", "files", "tensors", "parameters", "bytes",
/// "reused_bytes", "skipped": number, "seconds"}; step is null if there is none.
Json report_json(const ConsolidateReport& report);

}  // namespace tessera::io
