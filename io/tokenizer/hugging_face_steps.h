#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/json.h"
#include "io/tokenizer/decoder.h"
#include "io/tokenizer/normalizer.h"
#include "io/tokenizer/pre_tokenizer.h"

namespace tessera::io {

// Readers of the components in a tokenizer.json. They throw CorruptCheckpoint on malformed fields
// and Unsupported on components or fields that this build lacks, both naming file and field.

[[noreturn]] void refuse_field(const JsonReader& at, std::string_view what);
/// Refuses fields other than these, unless they are null.
void check_fields(const JsonReader& object, std::initializer_list<std::string_view> known);
/// An optional field: absent or null is `otherwise`.
bool read_flag(const JsonReader& object, std::string_view key, bool otherwise);
/// Whether an optional field is there and not null.
bool has_value(const JsonReader& object, std::string_view key);

struct PreTokenizerFields {
  std::vector<PreTokenizerStep> steps = {};
  bool byte_level = false;
};
struct DecoderFields {
  std::vector<DecoderStep> steps = {};
  bool byte_level = false;
};
struct SpecialIds {
  std::vector<std::int32_t> prefix = {}, suffix = {};
};
void read_normalizer(const JsonReader& at, std::vector<NormalizerStep>& steps);
void read_pre_tokenizer(const JsonReader& at, PreTokenizerFields& fields);
void read_decoder(const JsonReader& at, DecoderFields& fields);
void read_post_processor(const JsonReader& at, SpecialIds& ids);

}  // namespace tessera::io
