#pragma once

/// Whole models from the shards of a checkpoint, as safetensors or a Hugging Face directory.
/// Includes <filesystem>.
///
///     io::ConsolidateOptions options;
///     options.format = io::ExportFormat::Safetensors;
///     io::consolidate("runs/a", "whole", options);

#include "io/consolidate/consolidate.h"
