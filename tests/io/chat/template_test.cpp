// Templates against jinja2 and transformers: fixtures/cases.json is written by make_fixtures.py.
#include "io/chat/template.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/file.h"
#include "io/chat/chat_format.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using chat::Dict;
using nlohmann::ordered_json;

namespace {

const std::tm kDay = parse_chat_date("2024-07-26");

Dict dict(const ordered_json& json) { return *chat::from_json(json).dict(); }

std::string render(const std::string& text,
                   const ordered_json& variables = ordered_json::object()) {
  return chat::Template(text, "t").render(dict(variables), kDay).text;
}

/// Characters before a byte.
std::int64_t characters(const std::string& text, std::size_t bytes) {
  return chat::length(chat::Value(text.substr(0, bytes)));
}

}  // namespace

TEST_CASE("templates render as transformers renders them, byte for byte") {
  const auto path = test::source_path("tests/io/chat/fixtures/cases.json");
  const auto all = ordered_json::parse(read_file(path, 1 << 20));
  const test::TempDir dir;
  for (const auto& c : all["cases"]) {
    const auto name = c["template"].get<std::string>();
    CAPTURE(name);
    CAPTURE(c["title"].get<std::string>());
    const auto file = dir.write("t.jinja", all["templates"][name].get<std::string>());
    const ChatFormat format(*make_byte_tokenizer(), file, kDay, "--x");
    const Dict variables = dict(c["variables"]);
    const bool prompts = c["variables"].value("add_generation_prompt", false);
    if (c.contains("error")) {
      CHECK_THROWS_AS(format.render(variables, prompts), InvalidArgument);
      const auto error = c["error"].get<std::string>();
      if (error.find("oles") != error.npos)
        CHECK_THROWS_HOLDING(InvalidArgument, error, format.render(variables, prompts));
      continue;
    }
    const chat::Rendering found = format.render(variables, prompts);
    CHECK(found.text == c["text"].get<std::string>());
    if (!c.contains("generated")) continue;
    REQUIRE(found.generated.size() == c["generated"].size());
    for (std::size_t i = 0; i < found.generated.size(); ++i) {
      CHECK(characters(found.text, found.generated[i].first) == c["generated"][i][0]);
      CHECK(characters(found.text, found.generated[i].second) == c["generated"][i][1]);
    }
  }
}

TEST_CASE("errors name the template, the line and what is wrong") {
  const auto fails = [](const std::string& text, const char* what) {
    CAPTURE(text);
    CHECK_THROWS_HOLDING(Error, what, render(text));
  };
  fails("a\n{% if x %}\n", "t:2: a block has no {% endif %}");
  fails("{{ 1 + }}", "t:1: expected a value, found the end of the tag");
  fails("\n{{ a.b.c }}", "t:2: 'a' is undefined, so it has no 'b'");
  fails("{{ 'a' + 1 }}", "t:1: a str and an int have no '+'");
  fails("{{ x | nosuch }}", "t:1: this build has no template filter 'nosuch'");
  fails("{{ x is nosuch }}", "this build has no template test 'nosuch'");
  fails("{% include 'x' %}", "t:1: this build has no template statement 'include'");
  fails("{{ nosuch() }}", "t:1: 'nosuch' is undefined");
  fails("{% endif %}", "'endif' ends nothing");
  fails("{{ 'abc", "t:1: a string has no end");
  fails("{# abc", "a comment has no end");
  fails("{{ ) }}", "')' closes nothing");
  fails("{% break %}", "'break' outside of a loop");
  fails("{{ 1 // 0 }}", "division by zero");
  fails("{{ range('a') }}", "range: expected an int, found a str");
  fails("{{ 9223372036854775807 + 1 }}", "a whole number is too large");
  fails("{% set x = 1 %}{% set x.y = 1 %}", "only attributes of a namespace can be set");
  fails("{{ raise_exception('no ' ~ 1) }}", "t:1: the template refuses: no 1");
  fails("\xFF", "t: byte 0 is not valid UTF-8");
}

TEST_CASE("dates without padding, whole numbers of 64 bits, and text that is not UTF-8") {
  const auto day = [](const char* format) {
    return chat::Template(fmt::format("{{{{ strftime_now('{}') }}}}", format), "t")
        .render({}, parse_chat_date("2024-07-05"))
        .text;
  };
  CHECK(day("%-d/%-m/%y %d %e 100%") == "5/7/24 05  5 100%");
  CHECK(day("%-H:%-M %B") == "0:0 July");
  CHECK(render("{{ x | tojson }} {{ x > 1 }} {{ x is number }}", {{"x", 12345678901234567890U}}) ==
        "12345678901234567890 True True");
  CHECK(chat::Template("{{ x | trim }}", "t").render({{"x", "\x80\x80"}}, kDay).text.size() <= 2);
}

TEST_CASE("work, depth and size of a rendering are bounded") {
  const auto fails = [](const std::string& text, const char* what) {
    CAPTURE(text.substr(0, 60));
    CHECK_THROWS_HOLDING(InvalidArgument, what, render(text));
  };
  const auto repeated = [](const std::string& text, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += text;
    return out;
  };
  const char* const limits = "does not end within its limits";
  fails("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply");
  fails(
      "{% set n = namespace(s='ab') %}{% for i in range(100) %}{% set n.s = n.s ~ n.s %}{% endfor "
      "%}",
      limits);
  fails(
      "{% set n = namespace(l=[1]) %}{% for i in range(100) %}{% set n.l = n.l + n.l %}{% endfor "
      "%}",
      limits);
  fails(
      "{% set n = namespace(l=[1]) %}{% for i in range(100) %}{% set n.l = [n.l, n.l] %}{% endfor "
      "%}{{ n.l }}",
      limits);
  fails("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", limits);
  fails("{{ 'x' * 99999999999 }}", limits);
  fails("{{ range(100001) }}", "more than 100000 elements");
  fails("{{ " + repeated("(", 5000) + repeated(")", 5000) + " }}", "levels of nesting");
  fails("{{ 1" + repeated("+1", 5000) + " }}", "an expression of more than");
  fails(repeated("{% if 1 %}", 5000), "levels of nesting");
  fails("{{ " + repeated("not ", 5000) + "1 }}", "levels of nesting");
  CHECK(render("{{ range(9223372036854775800, 9223372036854775807, 5) | length }}") == "2");
  // A namespace within itself.
  CHECK(render("{% set n = namespace() %}{% set n.n = n %}{{ n.n == n }}{{ n }}") ==
        "True<a namespace>");
}
