#include "io/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "core/base/error.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

template <auto free_function>
struct FreeWith {
  template <typename T>
  void operator()(T* p) const {
    free_function(p);
  }
};
using Code = std::unique_ptr<pcre2_code, FreeWith<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, FreeWith<pcre2_compile_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, FreeWith<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, FreeWith<pcre2_match_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, FreeWith<pcre2_jit_stack_free>>;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct Regex::Compiled {
  Code code;
  std::string where;
  bool jit = false;
};

struct RegexMatches::State {
  const Regex::Compiled* regex = nullptr;
  MatchData data;
  MatchContext context;
  JitStack stack;  // allocated once the default of 32 KiB is exhausted
  std::string_view text;
  std::size_t from = 0;
  std::size_t last_end = std::string_view::npos;
};

Regex::Regex(std::string_view pattern, RegexSyntax syntax, std::string_view where)
    : compiled_(std::make_unique<Compiled>()) {
  compiled_->where = where;
  std::string translated;
  try {
    require<Unsupported>(find_malformed_utf8(pattern) == pattern.npos, "it is not UTF-8");
    translated = translate_regex(pattern, syntax);
  } catch (const Unsupported& error) {
    throw Unsupported("{}: regular expression {}: {}", where, pattern, error.what());
  }
  const CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  const std::uint32_t options =
      PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C |
      (syntax == RegexSyntax::Oniguruma ? PCRE2_MULTILINE : PCRE2_DOLLAR_ENDONLY);
  int code = 0;
  PCRE2_SIZE offset = 0;
  compiled_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()),
                                      translated.size(), options, &code, &offset, context.get()));
  require<Unsupported>(compiled_->code != nullptr, "{}: regular expression {}: {}", where, pattern,
                       compiled_->code ? "" : pcre2_message(code));
  compiled_->jit = pcre2_jit_compile(compiled_->code.get(), PCRE2_JIT_COMPLETE) == 0;
}

Regex::~Regex() = default;

bool Regex::looks_behind() const {
  std::uint32_t characters = 0;
  return pcre2_pattern_info(compiled_->code.get(), PCRE2_INFO_MAXLOOKBEHIND, &characters) != 0 ||
         characters > 0;
}

RegexMatches::RegexMatches(const Regex& regex) : state_(std::make_unique<State>()) {
  state_->regex = regex.compiled_.get();
  state_->data.reset(pcre2_match_data_create(1, nullptr));
  state_->context.reset(pcre2_match_context_create(nullptr));
}

RegexMatches::~RegexMatches() = default;

void RegexMatches::start(std::string_view text) {
  state_->text = text;
  state_->from = 0;
  state_->last_end = text.npos;
}

int RegexMatches::match(std::size_t from) {
  State& s = *state_;
  const auto run = [&](auto function) {
    return function(s.regex->code.get(), reinterpret_cast<PCRE2_SPTR>(s.text.data()), s.text.size(),
                    from, PCRE2_NO_UTF_CHECK, s.data.get(), s.context.get());
  };
  // An interpreted match needs no second try.
  int code = s.regex->jit ? run(pcre2_jit_match) : run(pcre2_match);
  if (code == PCRE2_ERROR_JIT_STACKLIMIT && !s.stack) {
    s.stack.reset(pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr));
    pcre2_jit_stack_assign(s.context.get(), nullptr, s.stack.get());
    code = run(pcre2_jit_match);
  }
  return code;
}

bool RegexMatches::next(std::size_t& begin, std::size_t& end) {
  State& s = *state_;
  while (s.from <= s.text.size()) {
    const int code = match(s.from);
    if (code == PCRE2_ERROR_NOMATCH) break;
    require(code >= 0, "{}: the regular expression fails at byte {} of a text of {}: {}",
            s.regex->where, s.from, s.text.size(), code >= 0 ? "" : pcre2_message(code));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(s.data.get());
    begin = range[0];
    end = range[1];
    if (begin == end && end == s.last_end) {  // an empty match right after the last one
      s.from += s.from < s.text.size() ? utf8_length(s.text[s.from]) : 1;
      continue;
    }
    s.from = s.last_end = end;
    return true;
  }
  s.from = s.text.size() + 1;
  return false;
}

}  // namespace tessera::io
