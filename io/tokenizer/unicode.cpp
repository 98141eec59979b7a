#include "io/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/error.h"
#include "io/data/text.h"
#include "io/tokenizer/unicode_additions.h"

namespace tessera::io {
namespace {

unsigned byte_at(std::string_view text, std::size_t i) {
  return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
}

/// Whether eight bytes from `i` are ASCII.
bool ascii_block(std::string_view text, std::size_t i) {
  std::uint64_t block = 0;
  std::memcpy(&block, text.data() + i, sizeof(block));
  return (block & 0x8080808080808080U) == 0;
}

/// Offset of the first byte at or after `i` that is not ASCII; the text's size if there is none.
std::size_t skip_ascii(std::string_view text, std::size_t i) {
  while (i + 8 <= text.size() && ascii_block(text, i)) i += 8;
  while (i < text.size() && byte_at(text, i) < 0x80) ++i;
  return i;
}

/// Length of the malformed sequence at `i`: a maximal subpart (Unicode 15, section 3.9).
std::size_t malformed_length(std::string_view text, std::size_t i) {
  const unsigned first = byte_at(text, i);
  const unsigned second = byte_at(text, i + 1);
  const unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (first < 0xE0 || first > 0xF4 || second < low || second > high) return 1;
  return first >= 0xF0 && (byte_at(text, i + 2) & 0xC0U) == 0x80U ? 3 : 2;
}

utf8proc_category_t category(char32_t point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(point));
}

/// A character of the same category, length and, if Han, script, which Unicode 14 has.
std::string_view stand_in(char32_t point) {
  // Most characters lie in these gaps of the table.
  if (point < 0x897 || (point > 0x31EF && point < 0xA7CB) || (point > 0xA7DC && point < 0x105C0))
    return {};
  const auto range = std::ranges::lower_bound(kUnicodeAdditions, point, {}, &UnicodeAddition::last);
  return range != std::end(kUnicodeAdditions) && range->first <= point ? range->stand_in
                                                                       : std::string_view();
}

utf8proc_option_t options_of(NormalForm form) {
  const bool composes = form == NormalForm::NFC || form == NormalForm::NFKC;
  int options = UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
  if (form == NormalForm::NFKC || form == NormalForm::NFKD) options |= UTF8PROC_COMPAT;
  return static_cast<utf8proc_option_t>(options);
}

void append_normalized(std::string_view text, utf8proc_option_t options, std::string& out) {
  utf8proc_uint8_t* result = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                 static_cast<utf8proc_ssize_t>(text.size()), &result, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  require<InternalError>(size >= 0, "utf8proc: {}", size >= 0 ? "" : utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(result), static_cast<std::size_t>(size));
}

// Characters that the reference, Hugging Face's tokenizers with tables of Unicode 9, leaves as they
// are.
bool newer_than_reference(char32_t point, NormalForm form) {
  if (point == 0x11938) return form == NormalForm::NFD || form == NormalForm::NFKD;
  if (form == NormalForm::NFC || form == NormalForm::NFD) return false;
  return point == 0x32FF || (point >= 0xA7F2 && point <= 0xA7F4) || point == 0xAB69 ||
         (point >= 0x10781 && point <= 0x107BA) || point == 0x1F16C ||
         (point >= 0x1FBF0 && point <= 0x1FBF9);
}

/// Characters that normalization leaves unchanged and that do not interact with those before them.
class StableSet {
 public:
  explicit StableSet(NormalForm form) : bits_(0x110000) {
    const auto options = options_of(form);
    std::string text, decomposed, normal;
    for (char32_t point = 0; point < 0x110000; ++point) {
      if ((point >= 0xD800 && point < 0xE000) || category(point) == UTF8PROC_CATEGORY_CN) continue;
      const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(point));
      if (property->combining_class != 0) {
        bits_[point] = true;
        continue;
      }
      if (property->decomp_seqindex == UINT16_MAX && (point < 0xAC00 || point > 0xD7A3)) continue;
      text.clear(), decomposed.clear(), normal.clear();
      append_utf8(point, text);
      append_normalized(text, options, normal);
      if (normal != text) bits_[point] = true;
      append_normalized(text, options_of(NormalForm::NFD), decomposed);
      std::size_t last = 0;
      for (std::size_t i = 0; i < decomposed.size(); i += utf8_length(decomposed[i])) last = i;
      if (last > 0) bits_[code_point_at(decomposed, last)] = true;
    }
    for (char32_t point = 0; point < 0x110000; ++point)
      if (newer_than_reference(point, form)) bits_[point] = false;
  }
  bool contains(char32_t point) const { return !bits_[point]; }

 private:
  std::vector<bool> bits_;  // true: not stable
};

const StableSet& stable_set(NormalForm form) {
  switch (form) {  // each is made on first use, which takes 30 ms
    case NormalForm::NFC: {
      static const StableSet set(NormalForm::NFC);
      return set;
    }
    case NormalForm::NFD: {
      static const StableSet set(NormalForm::NFD);
      return set;
    }
    case NormalForm::NFKC: {
      static const StableSet set(NormalForm::NFKC);
      return set;
    }
    case NormalForm::NFKD:
      break;
  }
  static const StableSet set(NormalForm::NFKD);
  return set;
}

}  // namespace

char32_t code_point_at(std::string_view text, std::size_t i) {
  const unsigned first = byte_at(text, i);
  if (first < 0x80) return first;
  const std::size_t length = utf8_length(text[i]);
  char32_t point = first & (0x7FU >> length);
  for (std::size_t k = 1; k < length; ++k) point = (point << 6) | (byte_at(text, i + k) & 0x3FU);
  return point;
}

std::size_t find_malformed_utf8(std::string_view text, std::size_t begin) {
  for (std::size_t i = skip_ascii(text, begin); i < text.size();) {
    const int length = utf8_sequence_length(text, i);
    if (length == 0) return i;
    i += static_cast<std::size_t>(length);
    if (byte_at(text, i) < 0x80) i = skip_ascii(text, i);
  }
  return std::string_view::npos;
}

std::string replace_malformed_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t begin = 0;;) {
    const std::size_t end = find_malformed_utf8(text, begin);
    out += text.substr(begin, end - begin);
    if (end == text.npos) return out;
    out += "\xEF\xBF\xBD";
    begin = end + malformed_length(text, end);
  }
}

bool mask_for_regex(std::string_view text, std::string& masked) {
  masked.clear();
  const auto replace = [&](std::size_t i, std::string_view by) {
    if (masked.empty()) masked = text;
    masked.replace(i, by.size(), by);
  };
  for (std::size_t i = skip_ascii(text, 0); i < text.size();) {
    const int length = utf8_sequence_length(text, i);
    if (length == 0) replace(i, "\x1A");
    if (length >= 3) {
      const char32_t point = code_point_at(text, i);
      if (const std::string_view other = stand_in(point); !other.empty()) replace(i, other);
    }
    i += static_cast<std::size_t>(std::max(length, 1));
    if (byte_at(text, i) < 0x80) i = skip_ascii(text, i);
  }
  return !masked.empty();
}

bool is_white_space(char32_t point) {
  return (point >= 0x9 && point <= 0xD) || point == 0x20 || point == 0x85 || point == 0xA0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200A) || point == 0x2028 ||
         point == 0x2029 || point == 0x202F || point == 0x205F || point == 0x3000;
}

bool is_number(char32_t point) {
  const std::string_view known = stand_in(point);
  const auto kind = category(known.empty() ? point : code_point_at(known, 0));
  return kind >= UTF8PROC_CATEGORY_ND && kind <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(char32_t point) {
  if (point < 0x80)
    return point > 0x20 && point < 0x7F && std::isalnum(static_cast<int>(point)) == 0;
  const auto kind = category(point);
  return kind >= UTF8PROC_CATEGORY_PC && kind <= UTF8PROC_CATEGORY_PO;
}

bool is_mark(char32_t point) {
  const auto kind = category(point);
  return kind >= UTF8PROC_CATEGORY_MN && kind <= UTF8PROC_CATEGORY_ME;
}

bool is_word_character(char32_t point) {
  const auto kind = category(point);
  return (kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_NL) ||
         kind == UTF8PROC_CATEGORY_PC || point == 0x200C || point == 0x200D ||
         (point >= 0x24B6 && point <= 0x24E9) || (point >= 0x1F130 && point <= 0x1F189);
}

std::string normalize_unicode(std::string_view text, NormalForm form) {
  std::string out;
  std::size_t copied = 0;
  std::size_t previous = 0;  // the last stable character
  for (std::size_t i = skip_ascii(text, 0); i < text.size();) {
    const StableSet& stable = stable_set(form);
    if (i > 0 && byte_at(text, i - 1) < 0x80) previous = i - 1;
    if (stable.contains(code_point_at(text, i))) {
      previous = i;
      i += utf8_length(text[i]);
    } else {
      while (i < text.size() && !stable.contains(code_point_at(text, i))) i += utf8_length(text[i]);
      out.append(text, copied, previous - copied);
      append_normalized(text.substr(previous, i - previous), options_of(form), out);
      copied = previous = i;
    }
    if (byte_at(text, i) < 0x80) i = skip_ascii(text, i);
  }
  out.append(text, copied, text.size() - copied);
  return out;
}

std::string lowercase_unicode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i])) {
    const char32_t point = code_point_at(text, i);
    if (point == 0x130) {
      out += "i\xCC\x87";
    } else {
      append_utf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(point))),
                  out);
    }
  }
  return out;
}

std::string uppercase_unicode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i])) {
    const auto point = static_cast<utf8proc_int32_t>(code_point_at(text, i));
    append_utf8(static_cast<char32_t>(utf8proc_toupper(point)), out);
  }
  return out;
}

}  // namespace tessera::io
