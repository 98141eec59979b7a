#pragma once

#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Sets the keys that follow from model.depth and are not given, as if they were given, and lists
/// them in config.from_depth. Does nothing if model.depth is 0.
///
/// With L = n_layer, C = n_embd, V = vocab_size (32768 unless given) and B = tokens of a step:
///   model    nanochat; L = depth; C = 64 depth, rounded up to heads of 128; seq_len 2048
///   tokens   N = 12 (12 L C^2 + V C): twelve for each parameter of blocks and head
///   batch    B = 2^19 (N / N of depth 12)^0.383, rounded to a power of two
///   steps    N / B
///   rates    muon: 0.1 sqrt(B / 2^19) / sqrt(C), twice that for embedding and head; constant, then
///            to 0 in the last fifth of the steps; not set for another family or optimizer
///
/// Source: github.com/karpathy/nanochat; the batch: Bergsma et al. 2025, arXiv:2505.13738. Its rate
/// 0.02 of Muon is divided by the scale 0.2 sqrt(C) of Muon here (arXiv:2502.16982); its rates of
/// AdamW are in proportion to the initial standard deviation, 0.8 there and 0.02 here.
/// @throws InvalidArgument if model.preset, model.init_from or another model.n_layer is given too
void apply_depth(Config& config);

/// Keys that model.depth has set, a line for each section; none without it.
std::vector<std::string> depth_lines(const Config& config);

}  // namespace tessera::tools
