#include "io/tokenizer/hugging_face_steps.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/tokenizer/pipeline.h"

namespace tessera::io {
namespace {

std::string type_of(const JsonReader& at) { return at.at("type").string(); }

/// {"String": "..."} or {"Regex": "..."}
Replace read_pattern(const JsonReader& at) {
  check_fields(at, {"String", "Regex"});
  if (at.has("String")) return {.text = at.at("String").string()};
  const JsonReader pattern = at.at("Regex");
  return {.pattern =
              std::make_shared<Regex>(pattern.string(), RegexSyntax::Oniguruma, pattern.where())};
}

SplitBehavior read_behavior(const JsonReader& at) {
  const std::string& name = at.string();
  if (name == "Removed") return SplitBehavior::Removed;
  if (name == "Isolated") return SplitBehavior::Isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::MergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::MergedWithNext;
  if (name == "Contiguous") return SplitBehavior::Contiguous;
  refuse_field(at, name);
}

Split split_with(const std::string& pattern, const std::string& where,
                 SplitBehavior behavior = SplitBehavior::Isolated, bool invert = false) {
  return {std::make_shared<const Regex>(pattern, RegexSyntax::Oniguruma, where), behavior, invert};
}

Metaspace read_metaspace(const JsonReader& at) {
  check_fields(at,
               {"type", "replacement", "prepend_scheme", "add_prefix_space", "str_rep", "split"});
  Metaspace metaspace;
  if (has_value(at, "replacement")) metaspace.mark = at.at("replacement").string();
  metaspace.split = read_flag(at, "split", true);
  using Where = Metaspace::Where;
  if (has_value(at, "prepend_scheme")) {
    const std::string& scheme = at.at("prepend_scheme").string();
    if (scheme != "always" && scheme != "first" && scheme != "never")
      refuse_field(at.at("prepend_scheme"), scheme);
    metaspace.prepend = scheme == "always"  ? Where::Always
                        : scheme == "first" ? Where::First
                                            : Where::Never;
  } else if (!read_flag(at, "add_prefix_space", true)) {
    metaspace.prepend = Where::Never;
  }
  return metaspace;
}

/// Calls `read` for each element of a Sequence's list.
template <typename Read>
void read_sequence(const JsonReader& at, std::string_view list, const Read& read) {
  check_fields(at, {"type", list});
  const JsonReader all = at.at(list);
  for (std::size_t i = 0; i < all.array_size(); ++i) read(all.at(i));
}

std::size_t read_count(const JsonReader& at, std::string_view key) {
  return static_cast<std::size_t>(at.at(key).integer(0, 1 << 20));
}

void read_template(const JsonReader& at, SpecialIds& ids) {
  const JsonReader single = at.at("single");
  bool after = false;
  for (std::size_t i = 0; i < single.array_size(); ++i) {
    const JsonReader piece = single.at(i);
    if (piece.has("Sequence")) {
      if (after) refuse_field(piece, "a second sequence");
      after = true;
      continue;
    }
    const std::string& name = piece.at("SpecialToken").at("id").string();
    const JsonReader list = at.at("special_tokens").at(name).at("ids");
    for (std::size_t k = 0; k < list.array_size(); ++k)
      (after ? ids.suffix : ids.prefix)
          .push_back(static_cast<std::int32_t>(list.at(k).integer(0, kMaxTokenId)));
  }
}

}  // namespace

void refuse_field(const JsonReader& at, std::string_view what) {
  throw Unsupported("{}: {} is not supported", at.where(), what);
}

void check_fields(const JsonReader& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.object().items()) {
    if (!value.is_null() && std::ranges::find(known, key) == known.end())
      refuse_field(object.at(key), "this field");
  }
}

bool has_value(const JsonReader& object, std::string_view key) {
  return object.has(key) && !object.at(key).value().is_null();
}

bool read_flag(const JsonReader& object, std::string_view key, bool otherwise) {
  if (!has_value(object, key)) return otherwise;
  const Json& value = object.at(key).value();
  require<CorruptCheckpoint>(value.is_boolean(), "{}: expected true or false, found {}",
                             object.at(key).where(), value.type_name());
  return value.get<bool>();
}

void read_normalizer(const JsonReader& at, std::vector<NormalizerStep>& steps) {
  const std::string type = type_of(at);
  if (type == "Sequence") {
    return read_sequence(at, "normalizers",
                         [&](const JsonReader& step) { read_normalizer(step, steps); });
  }
  if (type == "NFC") return steps.emplace_back(NormalForm::NFC), void();
  if (type == "NFD") return steps.emplace_back(NormalForm::NFD), void();
  if (type == "NFKC") return steps.emplace_back(NormalForm::NFKC), void();
  if (type == "NFKD") return steps.emplace_back(NormalForm::NFKD), void();
  if (type == "Lowercase") return steps.emplace_back(Lowercase()), void();
  if (type == "StripAccents") return steps.emplace_back(StripAccents()), void();
  if (type == "Prepend") {
    check_fields(at, {"type", "prepend"});
    steps.emplace_back(Prepend{at.at("prepend").string()});
  } else if (type == "Strip") {
    check_fields(at, {"type", "strip_left", "strip_right"});
    steps.emplace_back(
        StripSpace{read_flag(at, "strip_left", true), read_flag(at, "strip_right", true)});
  } else if (type == "Replace") {
    check_fields(at, {"type", "pattern", "content"});
    Replace replace = read_pattern(at.at("pattern"));
    replace.by = at.at("content").string();
    steps.emplace_back(std::move(replace));
  } else {
    refuse_field(at, fmt::format("the normalizer {}", type));
  }
}

void read_pre_tokenizer(const JsonReader& at, PreTokenizerFields& fields) {
  const std::string type = type_of(at);
  if (type == "Sequence") {
    return read_sequence(at, "pretokenizers",
                         [&](const JsonReader& step) { read_pre_tokenizer(step, fields); });
  }
  if (fields.byte_level) refuse_field(at, "a pre-tokenizer after ByteLevel");
  auto& steps = fields.steps;
  if (type == "ByteLevel") {
    check_fields(at, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    if (read_flag(at, "add_prefix_space", true)) steps.emplace_back(PrefixSpace());
    if (read_flag(at, "use_regex", true)) steps.emplace_back(split_with(kGpt2Pattern, at.where()));
    fields.byte_level = true;
  } else if (type == "Split") {
    check_fields(at, {"type", "pattern", "behavior", "invert"});
    const Replace pattern = read_pattern(at.at("pattern"));
    Split split{.delimiter = pattern.text,
                .behavior = read_behavior(at.at("behavior")),
                .invert = read_flag(at, "invert", false)};
    if (pattern.pattern) split.delimiter = pattern.pattern;
    steps.emplace_back(std::move(split));
  } else if (type == "Metaspace") {
    steps.emplace_back(read_metaspace(at));
  } else if (type == "Digits") {
    check_fields(at, {"type", "individual_digits"});
    const bool individual = read_flag(at, "individual_digits", false);
    steps.emplace_back(
        Split{is_number, individual ? SplitBehavior::Isolated : SplitBehavior::Contiguous});
  } else if (type == "Punctuation") {
    check_fields(at, {"type", "behavior"});
    steps.emplace_back(Split{is_punctuation, has_value(at, "behavior")
                                                 ? read_behavior(at.at("behavior"))
                                                 : SplitBehavior::Isolated});
  } else if (type == "Whitespace") {
    steps.emplace_back(split_with(R"(\w+|[^\w\s]+)", at.where(), SplitBehavior::Removed, true));
  } else if (type == "WhitespaceSplit") {
    steps.emplace_back(Split{is_white_space, SplitBehavior::Removed});
  } else {
    refuse_field(at, fmt::format("the pre-tokenizer {}", type));
  }
}

void read_decoder(const JsonReader& at, DecoderFields& fields) {
  const std::string type = type_of(at);
  if (type == "Sequence") {
    return read_sequence(at, "decoders",
                         [&](const JsonReader& step) { read_decoder(step, fields); });
  }
  auto& steps = fields.steps;
  if (fields.byte_level) refuse_field(at, "a decoder after ByteLevel");
  if (type == "ByteLevel") {
    if (!steps.empty()) refuse_field(at, "ByteLevel after another decoder");
    fields.byte_level = true;
  } else if (type == "ByteFallback") {
    steps.emplace_back(BytesFromTokens());
  } else if (type == "Fuse") {
    steps.emplace_back(Fuse());
  } else if (type == "Strip") {
    check_fields(at, {"type", "content", "start", "stop"});
    steps.emplace_back(
        StripEnds{at.at("content").string(), read_count(at, "start"), read_count(at, "stop")});
  } else if (type == "Replace") {
    check_fields(at, {"type", "pattern", "content"});
    Replace replace = read_pattern(at.at("pattern"));
    replace.by = at.at("content").string();
    steps.emplace_back(std::move(replace));
  } else if (type == "Metaspace") {
    const Metaspace metaspace = read_metaspace(at);
    steps.emplace_back(SpaceFromMark{metaspace.mark, metaspace.prepend != Metaspace::Where::Never});
  } else {
    refuse_field(at, fmt::format("the decoder {}", type));
  }
}

void read_post_processor(const JsonReader& at, SpecialIds& ids) {
  const std::string type = type_of(at);
  if (type == "Sequence") {
    read_sequence(at, "processors",
                  [&](const JsonReader& step) { read_post_processor(step, ids); });
  } else if (type == "TemplateProcessing") {
    read_template(at, ids);
  } else if (type != "ByteLevel") {  // which only changes offsets
    refuse_field(at, fmt::format("the post-processor {}", type));
  }
}

}  // namespace tessera::io
