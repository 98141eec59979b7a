// Differences between the syntaxes, and what becomes of them:
//
//   \s \S          white space of Unicode, spelled out: PCRE2 adds U+180E
//   \w \W \b \B    spelled out with properties: PCRE2 has letters, numbers and underscore
//   \h \v          Oniguruma: hexadecimal digit, vertical tab. PCRE2: classes of space
//   (?m)           Oniguruma: dot matches newlines, (?s) in PCRE2
//   {n,m}+         Oniguruma: repeats the group. PCRE2 and Rust: possessive
//   [a[bc]]        union of sets, flattened

#include <algorithm>
#include <cctype>
#include <vector>

#include "core/base/error.h"
#include "io/tokenizer/regex.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

constexpr const char* kSpace =
    R"(\t-\r\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr const char* kNoSpace =
    R"(\x{0}-\x{8}\x{E}-\x{1F}\x{21}-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF})"
    R"(\x{200B}-\x{2027}\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";
constexpr const char* kWordOniguruma =
    R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";
constexpr const char* kWordRust = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D})";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

class Translation {
 public:
  Translation(std::string_view pattern, RegexSyntax syntax)
      : in_(pattern), ruby_(syntax == RegexSyntax::Oniguruma) {}

  std::string run() {
    while (i_ < in_.size()) step();
    return out_;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw Unsupported("{} at position {} is not supported", what, i_);
  }
  char at(std::size_t k) const { return i_ + k < in_.size() ? in_[i_ + k] : '\0'; }
  bool starts(std::string_view text) const { return in_.substr(i_).starts_with(text); }
  const char* word() const { return ruby_ ? kWordOniguruma : kWordRust; }

  void start_atom() {
    atom_ = out_.size();
    quantified_ = false;
  }

  void step() {
    switch (in_[i_]) {
      case '\\':
        start_atom();
        return escape(false);
      case '[':
        start_atom();
        return set();
      case '(':
        return open_group();
      case ')':
        if (groups_.empty()) refuse("an unmatched )");
        atom_ = groups_.back();
        groups_.pop_back();
        quantified_ = false;
        break;
      case '*':
      case '+':
      case '?':
        return simple_quantifier();
      case '{':
        return counted_quantifier();
      case '|':
      case '^':
      case '$':
        atom_ = std::string::npos;
        break;
      default:
        start_atom();
        for (std::size_t n = utf8_length(in_[i_]); n > 1; --n) out_ += in_[i_++];
    }
    out_ += in_[i_++];
  }

  void open_group() {
    groups_.push_back(out_.size());
    atom_ = std::string::npos;
    if (at(1) != '?') {
      if (at(1) == '*') refuse("(*");
      out_ += in_[i_++];
      return;
    }
    for (const std::string_view plain : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!starts(plain)) continue;
      out_ += plain;
      i_ += plain.size();
      return;
    }
    if (starts("(?<") || starts("(?P<") || starts("(?#")) refuse("a named group or comment");
    const bool at_start = out_.empty();
    std::string flags = "(?";
    for (i_ += 2; i_ < in_.size() && in_[i_] != ':' && in_[i_] != ')'; ++i_) {
      const char flag = in_[i_];
      if (flag == 'm' && ruby_) {
        flags += 's';
      } else if (flag == 'i' || flag == '-' || (!ruby_ && (flag == 'm' || flag == 's'))) {
        flags += flag;
      } else if (ruby_ || flag != 'u') {
        refuse("a flag");
      }
    }
    if (i_ == in_.size()) refuse("an unfinished group");
    if (in_[i_] == ')') {
      // Oniguruma's applies to the alternatives that follow as well, PCRE2's to the rest of one.
      if (!at_start) refuse("a flag in the middle");
      groups_.pop_back();
    }
    out_ += flags + in_[i_++];
  }

  void simple_quantifier() {
    if (atom_ == std::string::npos || quantified_) refuse("a quantifier without an atom");
    out_ += in_[i_++];
    if (at(0) == '+' || at(0) == '?') out_ += in_[i_++];
    quantified_ = true;
  }

  void counted_quantifier() {
    std::size_t end = i_ + 1;
    const auto digits = [&] {
      const std::size_t first = end;
      while (end < in_.size() && is_digit(in_[end])) ++end;
      return end - first;
    };
    const std::size_t low = digits();
    const bool comma = end < in_.size() && in_[end] == ',';
    if (comma) ++end;
    const std::size_t high = comma ? digits() : 0;
    if (end >= in_.size() || in_[end] != '}' || low + high == 0) {  // literal
      start_atom();
      out_ += "\\{";
      ++i_;
      return;
    }
    if (atom_ == std::string::npos || quantified_) refuse("a quantifier without an atom");
    out_ += low == 0 ? "{0" : "{";
    out_ += in_.substr(i_ + 1, end - i_);
    i_ = end + 1;
    quantified_ = true;
    if (ruby_ && at(0) == '?' && !comma) refuse("{n}?");
    if (ruby_ && at(0) == '+') {
      out_.insert(atom_, "(?:");
      out_ += ")+";
      ++i_;
    } else if (at(0) == '+' || at(0) == '?') {
      out_ += in_[i_++];
    }
  }

  // Closing bracket included. Nested sets are added to the outer one.
  void set() {
    out_ += in_[i_++];
    const bool negated = at(0) == '^';
    if (negated) out_ += in_[i_++];
    if (at(0) == ']') {
      out_ += "\\]";
      ++i_;
    }
    for (int depth = 1; depth > 0;) {
      if (i_ >= in_.size()) refuse("an unfinished set");
      const char c = in_[i_];
      if (c == ']') {
        ++i_;
        --depth;
      } else if (c == '[') {
        if (at(1) == ':' || at(1) == '^' || at(1) == ']') refuse("a set in a set");
        ++i_;
        ++depth;
      } else if (c == '\\') {
        escape(true);
      } else if (starts("&&") || (!ruby_ && (starts("--") || starts("~~")))) {
        refuse("an operation on sets");
      } else {
        out_ += c;
        ++i_;
      }
    }
    out_ += ']';
  }

  void escape(bool in_set) {
    const char c = at(1);
    if (i_ + 1 >= in_.size()) refuse("a lone backslash");
    const auto set_of = [&](std::string_view items, bool negated = false) {
      out_ += in_set ? std::string(items) : fmt::format("[{}{}]", negated ? "^" : "", items);
      i_ += 2;
    };
    switch (c) {
      case 's':
        return set_of(kSpace);
      case 'S':
        return in_set ? set_of(kNoSpace) : set_of(kSpace, true);
      case 'w':
        return set_of(word());
      case 'W':
        if (in_set) refuse("\\W in a set");
        return set_of(word(), true);
      case 'h':
        if (!ruby_) refuse("\\h");
        return set_of("0-9a-fA-F");
      case 'v':
        return set_of("\\x0B");
      case 'p':
      case 'P':
        return property();
      case 'x':
      case 'u':
        return code_point();
      case 'b':
      case 'B':
        if (in_set) refuse("\\b in a set");
        out_ += fmt::format("(?:(?<=[{0}])(?{1}[{0}])|(?<![{0}])(?{2}[{0}]))", word(),
                            c == 'b' ? "!" : "=", c == 'b' ? "=" : "!");
        i_ += 2;
        return;
      case 'd':
      case 'D':
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
      case 'A':
      case 'z':
        if (in_set && (c == 'A' || c == 'z')) refuse("an anchor in a set");
        out_ += in_.substr(i_, 2);
        i_ += 2;
        return;
      default:
        break;
    }
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) refuse(in_.substr(i_, 2));
    ++i_;
    if (static_cast<unsigned char>(c) < 0x80) {
      out_ += '\\';
      out_ += in_[i_++];
    } else {
      for (std::size_t n = utf8_length(c); n > 0 && i_ < in_.size(); --n) out_ += in_[i_++];
    }
  }

  void property() {
    const std::size_t end = at(2) == '{' ? in_.find('}', i_) : i_ + 2;
    if (end >= in_.size()) refuse("an unfinished property");
    std::string_view name = in_.substr(i_ + 2, end + 1 - (i_ + 2));
    out_ += in_.substr(i_, 2);
    // PCRE2 10.40 and newer know names of scripts and binary properties, too.
    out_ += name.size() == 1 ? fmt::format("{{{}}}", name) : std::string(name);
    i_ = end + 1;
  }

  void code_point() {
    const bool braces = at(2) == '{';
    std::size_t begin = i_ + (braces ? 3 : 2);
    std::size_t end = begin;
    const std::size_t most = braces ? 8 : at(1) == 'u' ? 4 : 2;
    while (end < in_.size() && end - begin < most && is_hex(in_[end])) ++end;
    if (end == begin || (braces && (end >= in_.size() || in_[end] != '}'))) refuse("an escape");
    const std::string_view hex = in_.substr(begin, end - begin);
    // Oniguruma's \xHH is a byte, not a character.
    if (ruby_ && !braces && at(1) == 'x' && hex.size() == 2 && hex[0] >= '8') refuse("a byte");
    out_ += fmt::format("\\x{{{}}}", hex);
    i_ = end + (braces ? 1 : 0);
  }

  std::string_view in_;
  bool ruby_;
  std::size_t i_ = 0;
  std::string out_;
  std::size_t atom_ = std::string::npos;  // where the last atom begins in out_
  bool quantified_ = false;
  std::vector<std::size_t> groups_;  // where open groups begin in out_
};

}  // namespace

std::string translate_regex(std::string_view pattern, RegexSyntax syntax) {
  return Translation(pattern, syntax).run();
}

}  // namespace tessera::io
