#include "io/tokenizer/sentence_piece_model.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

constexpr const char* kMark = "\xE2\x96\x81";  // "▁"

/// Reads the fields of a protocol buffer message.
class Message {
 public:
  explicit Message(std::string_view bytes) : bytes_(bytes) {}

  struct Field {
    std::uint64_t number = 0, value = 0;
    std::string_view bytes = {};
  };
  /// @return false at the end, and if the message is malformed
  bool next(Field& field) {
    std::uint64_t tag = 0;
    field = {};
    if (bytes_.empty() || !varint(tag)) return false;
    field.number = tag >> 3;
    switch (tag & 7) {
      case 0:
        return varint(field.value);
      case 1:
        return take(8, field.bytes);
      case 2:
        return varint(field.value) && take(field.value, field.bytes);
      case 5:
        return take(4, field.bytes);
      default:
        malformed_ = true;
        return false;
    }
  }
  bool malformed() const { return malformed_; }

 private:
  bool varint(std::uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      std::string_view byte;
      if (!take(1, byte)) return false;
      value |= std::uint64_t{static_cast<unsigned char>(byte[0])} % 128 << shift;
      if (static_cast<unsigned char>(byte[0]) < 128) return true;
    }
    malformed_ = true;
    return false;
  }
  bool take(std::uint64_t size, std::string_view& part) {
    malformed_ = malformed_ || size > bytes_.size();
    if (malformed_) return false;
    part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }

  std::string_view bytes_;
  bool malformed_ = false;
};

/// Calls `use` for each field. @return false if the message is malformed
bool for_each_field(std::string_view bytes, const std::function<void(const Message::Field&)>& use) {
  Message message(bytes);
  for (Message::Field field; message.next(field);) use(field);
  return !message.malformed();
}

/// Whether every character of every piece is a piece, so that merges need no other symbols.
bool characters_are_pieces(const std::unordered_map<std::string_view, std::int32_t>& ids) {
  return std::ranges::all_of(ids, [&](const auto& entry) {
    const std::string_view text = entry.first;
    for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i]))
      if (!ids.contains(text.substr(i, utf8_length(text[i])))) return false;
    return true;
  });
}

}  // namespace

std::optional<SentencePieceModel> parse_sentence_piece_model(std::string_view bytes) {
  SentencePieceModel model;
  bool valid = true;
  const auto piece = [&](std::string_view message) {
    SentencePiece& added = model.pieces.emplace_back();
    valid &= for_each_field(message, [&](const Message::Field& field) {
      if (field.number == 1) added.text = field.bytes;
      if (field.number == 2 && field.bytes.size() == sizeof(float))
        std::memcpy(&added.score, field.bytes.data(), sizeof(float));
      if (field.number == 3) added.type = static_cast<int>(field.value);
    });
  };
  const auto trainer = [&](const Message::Field& field) {
    if (field.number == 3) model.is_bpe = field.value == 2;
    if (field.number == 24) model.space_is_suffix = field.value != 0;
    if (field.number == 35) model.byte_fallback = field.value != 0;
  };
  const auto normalizer = [&](const Message::Field& field) {
    if (field.number == 2) model.has_normalization_table = !field.bytes.empty();
    if (field.number == 3) model.add_dummy_prefix = field.value != 0;
    if (field.number == 4) model.remove_extra_spaces = field.value != 0;
    if (field.number == 5) model.escape_spaces = field.value != 0;
  };
  valid &= for_each_field(bytes, [&](const Message::Field& field) {
    if (field.number == 1) piece(field.bytes);
    if (field.number == 2) valid &= for_each_field(field.bytes, trainer);
    if (field.number == 3) valid &= for_each_field(field.bytes, normalizer);
  });
  return valid ? std::optional(std::move(model)) : std::nullopt;
}

std::optional<Pipeline> sentence_piece_pipeline(const SentencePieceModel& model) {
  if (!model.is_bpe || model.space_is_suffix || model.has_normalization_table ||
      model.remove_extra_spaces || !model.escape_spaces)
    return std::nullopt;
  std::vector<std::string> tokens(model.pieces.size());
  std::vector<AddedToken> user_defined;
  std::unordered_map<std::string_view, std::int32_t> ids;
  std::vector<float> scores;
  std::int32_t unk_id = -1;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const SentencePiece& piece = model.pieces[i];
    const auto id = static_cast<std::int32_t>(i);
    if (piece.text.empty() || find_malformed_utf8(piece.text) != std::string::npos)
      return std::nullopt;
    const bool is_character = piece.text.size() == utf8_length(piece.text[0]);
    switch (piece.type) {
      case SentencePiece::Normal:
        tokens[i] = piece.text;
        ids.emplace(piece.text, id);
        scores.push_back(piece.score);
        break;
      case SentencePiece::Byte:
        tokens[i] = piece.text;
        break;
      case SentencePiece::UserDefined:
        user_defined.push_back({.id = id, .text = piece.text, .normalized = true});
        break;
      case SentencePiece::Unknown:
        unk_id = id;
        [[fallthrough]];
      case SentencePiece::Control:
        if (is_character) return std::nullopt;
        break;
      default:
        return std::nullopt;
    }
  }
  if (!ids.contains(kMark) || !characters_are_pieces(ids)) return std::nullopt;
  // The highest score merges first, of equal ones the leftmost pair.
  std::ranges::sort(scores, std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  std::vector<Merge> merges;
  for (const auto& [text, id] : ids) {
    const float score = model.pieces[static_cast<std::size_t>(id)].score;
    const auto rank = static_cast<std::uint32_t>(
        std::ranges::lower_bound(scores, score, std::greater<>()) - scores.begin());
    for (std::size_t cut = utf8_length(text[0]); cut < text.size(); cut += utf8_length(text[cut])) {
      const auto left = ids.find(text.substr(0, cut));
      const auto right = ids.find(text.substr(cut));
      if (left != ids.end() && right != ids.end())
        merges.push_back({left->second, right->second, id, rank});
    }
  }
  std::vector<NormalizerStep> normalizer;
  if (model.add_dummy_prefix) normalizer.emplace_back(Prepend{kMark});
  normalizer.emplace_back(Replace{.text = " ", .by = kMark});
  const BpeOptions options{
      .byte_fallback = model.byte_fallback, .fuse_unk = true, .unk_id = unk_id};
  return Pipeline{.kind = "sentencepiece",
                  .normalizer = Normalizer(std::move(normalizer)),
                  .model = Bpe(std::move(tokens), merges, options),
                  .added = std::move(user_defined),
                  .pieces = std::vector<std::string>(model.pieces.size())};
}

}  // namespace tessera::io
