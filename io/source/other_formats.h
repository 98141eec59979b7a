#pragma once

#include <string>

#include "io/base/file.h"

namespace tessera::io {

/// Name of a format that tessera does not read, and how to convert it, by the name of a file or the
/// names in a directory: "an ONNX model: give the PyTorch checkpoint that it was exported from".
/// Empty if they are of none. Ask only about paths that are otherwise unknown: files of these names
/// may be beside those of any checkpoint.
std::string describe_other_format(const fs::path& path);

/// @throws Unsupported with describe_other_format(path), unless that is empty
void refuse_other_format(const fs::path& path);

}  // namespace tessera::io
