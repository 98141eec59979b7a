#pragma once

/// Training data: token files, text and tokenizers, and the order of samples.
///
///     const auto data = io::open_dataset({.train = {"data/*.bin"}});
///     const io::Sampler sampler(data.train, 1024, io::DataOrder::Shuffled, 1);
///
/// Conversations (.jsonl) are in data.conversations instead, and io::ConversationSamples packs them.

#include "io/chat/conversations.h"
#include "io/data/dataset.h"
#include "io/data/sampler.h"
#include "io/data/token_file.h"
#include "io/data/token_source.h"
#include "io/data/tokenizer.h"
