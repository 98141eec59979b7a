#pragma once

/// Checkpoints: find, read, and save those of any number of ranks. Includes <filesystem>.
///
///     const auto checkpoint = io::open_checkpoint("runs/a");       // its newest step
///     const auto& weights = checkpoint.source(io::kModelSection);
///     for (const io::TensorInfo& info : weights.tensors()) {
///       std::vector<float> values(numel(info.shape));
///       weights.read(info.name, 0, numel(info.shape), values.data(), DType::F32);
///     }

#include "io/checkpoint/find.h"
#include "io/checkpoint/list.h"
#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "io/checkpoint/verify.h"
