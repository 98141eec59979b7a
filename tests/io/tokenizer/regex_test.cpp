#include "io/tokenizer/regex.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::io;

namespace {

std::vector<std::string> find_all(const char* pattern, const std::string& text,
                                  RegexSyntax syntax = RegexSyntax::Oniguruma) {
  const Regex regex(pattern, syntax, "test");
  RegexMatches matches(regex);
  matches.start(text);
  std::vector<std::string> found;
  for (std::size_t begin = 0, end = 0; matches.next(begin, end);)
    found.push_back(text.substr(begin, end - begin));
  return found;
}
using Found = std::vector<std::string>;

}  // namespace

TEST_CASE("classes follow Unicode, not PCRE2") {
  CHECK(find_all(R"(\s)", "a\u180e\u0085\u00a0\u3000b") == Found{"\u0085", "\u00a0", "\u3000"});
  CHECK(find_all(R"(\S+)", "a\u180eb c") == Found{"a\u180eb", "c"});
  CHECK(find_all(R"([^\S\n]+)", "a \t\nb") == Found{" \t"});
  CHECK(find_all(R"(\w+)", "e\u0301_x\u203fy-\u00b2") == Found{"e\u0301_x\u203fy", "\u00b2"});
  CHECK(find_all(R"(\bx)", "x ax e\u0301x") == Found{"x"});
  CHECK(find_all(R"([\p{L}\p{N}]+)", "\u6211a1 \u0663") == Found{"\u6211a1", "\u0663"});
  CHECK(find_all(R"(\h+)", "beg") == Found{"be"});
}

TEST_CASE("quantifiers, flags and anchors of both syntaxes") {
  // Ruby repeats the group, Rust takes it as possessive.
  CHECK(find_all("a{1,2}+", "aaaaa") == Found{"aaaaa"});
  CHECK(find_all("a{1,2}+", "aaaaa", RegexSyntax::Rust) == Found{"aa", "aa", "a"});
  CHECK(find_all("(?:ab){2}+", "ababababab") == Found{"abababab"});
  CHECK(find_all("a{,2}b", "aaab") == Found{"aab"});
  CHECK(find_all("a{x}", "a{x}") == Found{"a{x}"});
  CHECK(find_all("a++a|b", "aab") == Found{"b"});
  CHECK(find_all("(?i:'s|'t)", "'S '\u017f 'T") == Found{"'S", "'\u017f", "'T"});
  CHECK(find_all("(?m).", "\n") == Found{"\n"});
  CHECK(find_all("^a$", "a\na") == Found{"a", "a"});
  CHECK(find_all("^a$", "a\na", RegexSyntax::Rust).empty());
  CHECK(find_all("a$", "a\n", RegexSyntax::Rust).empty());
  CHECK(find_all("[a[bc]d]+", "abcd[") == Found{"abcd"});
  CHECK(find_all("[]a]+", "a]b") == Found{"a]"});
  CHECK(find_all(R"(\u0041\x{42}\-\/)", "AB-/") == Found{"AB-/"});
}

TEST_CASE("empty matches do not repeat") {
  CHECK(find_all("b*", "abc") == Found{"", "b", ""});
  CHECK(find_all("", "\u6211") == Found{"", ""});
}

TEST_CASE("syntax with another meaning in PCRE2 is refused with its place") {
  for (const char* pattern :
       {"[a&&b]", "(?<n>a)", "(?x)a",       "a(?i)b",  "(*ACCEPT)",       R"([\W])", R"(\G)",
        R"(\1)",  R"(\K)",   "[[:alpha:]]", "[a[^b]]", "a{2}?",           "*a",      "a**",
        "(",      ")",       "[a",          "\\",      R"(\p{Nonsense})", "\xff",    R"(\xff)"}) {
    INFO(pattern);
    CHECK_THROWS_HOLDING(Unsupported, "f.json: x",
                         Regex(pattern, RegexSyntax::Oniguruma, "f.json: x"));
  }
}

TEST_CASE("backtracking beyond every limit is an error, not a crash") {
  const Regex regex("(?:a|aa)+$", RegexSyntax::Rust, "test");
  RegexMatches matches(regex);
  const std::string text = std::string(100000, 'a') + "b";
  matches.start(text);
  std::size_t begin = 0, end = 0;
  CHECK_THROWS_HOLDING(InvalidArgument, "regular expression fails", matches.next(begin, end));
}
