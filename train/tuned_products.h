#pragma once

#include <filesystem>
#include <string>

#include "core/base/product_tuning.h"

namespace tessera::train {

/// Most bytes of a file of tuned products, which the control channel sends as one message.
inline constexpr std::size_t kMostTunedBytes = 1'000'000;

/// JSON text of a file of tuned products:
///
///     {"format": "tessera-tuned-products", "version": 1,
///      "gpus": {GPU: {PRODUCT: {"algorithm": HEX, "workspace_bytes": N, "microseconds": T}
///                           or {"apart": true, "microseconds": T}}}}
std::string format_tuned_products(const TunedProducts& products);
/// @param source  named in errors
/// @throws InvalidArgument naming the source and the place in it
TunedProducts parse_tuned_products(const std::string& text, const std::string& source);

/// Reads a file, which may be absent, and checks that it can be written.
/// @throws InvalidArgument if it is no file of tuned products; IoError
TunedProducts open_tuned_products(const std::filesystem::path& file);
/// Adds entries to a file, keeping others, also those that another run has added meanwhile.
/// @throws as open_tuned_products; the file is then unchanged
void add_tuned_products(const std::filesystem::path& file, const TunedProducts& newer);

}  // namespace tessera::train
