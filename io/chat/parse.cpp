// The grammar of jinja2 3.1 (lexer.py, parser.py) as far as chat templates use it.
#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>

#include "io/chat/syntax.h"
#include "io/data/text.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io::chat {
namespace {

constexpr int kMostDepth = 150;  // of nested expressions or blocks
constexpr std::string_view kSpace = " \t\n\r\f\v";

struct Token {
  enum class Kind { Text, Begin, End, Name, String, Integer, Float, Operator };
  Kind kind = Kind::End;
  std::string text = {};  // of Begin: "{{" or "{%"
  int line = 0;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c);
}

class Lexer {
 public:
  Lexer(std::string_view text, const std::string& name) : name_(name) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool is_pair = text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n';
      if (!is_pair) text_ += text[i] == '\r' ? '\n' : text[i];
    }
    if (text_.ends_with('\n')) text_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < text_.size()) {
      std::size_t tag = at_;
      while ((tag = text_.find('{', tag)) != text_.npos &&
             (tag + 1 == text_.size() || std::string_view("{%#").find(text_[tag + 1]) == npos))
        ++tag;
      data(std::min(tag, text_.size()));
      if (tag != text_.npos) this->tag();
    }
    return std::move(tokens_);
  }

 private:
  static constexpr std::size_t npos = std::string_view::npos;

  [[noreturn]] void fail(const std::string& why) const {
    throw InvalidArgument("{}:{}: {}", name_, line_, why);
  }

  void advance(std::size_t to) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         text_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  // Text up to a tag, which may strip its end.
  void data(std::size_t end) {
    std::string text = text_.substr(at_, end - at_);
    const int line = line_;
    if (end < text_.size()) {
      const char mark = end + 2 < text_.size() ? text_[end + 2] : ' ';
      const std::size_t last_line = text.rfind('\n') + 1;  // 0 if there is none
      if (mark == '-') {
        text.erase(text.find_last_not_of(kSpace) + 1);
      } else if (mark != '+' && text_[end + 1] != '{' && (last_line > 0 || starts_line_) &&
                 text.find_first_not_of(kSpace, last_line) == npos) {
        text.erase(last_line);
      }
    }
    advance(end);
    if (!text.empty()) tokens_.push_back({Token::Kind::Text, std::move(text), line});
  }

  // Skips an end of a tag at `end`, with the space that it strips.
  void skip_end(std::size_t end, bool trims_newline) {
    const char mark = text_[end];
    end += (mark == '-' || mark == '+') ? 3 : 2;
    if (mark == '-') {
      end = std::min(text_.find_first_not_of(kSpace, end), text_.size());
    } else if (trims_newline && mark != '+' && end < text_.size() && text_[end] == '\n') {
      ++end;
    }
    starts_line_ = text_[end - 1] == '\n';
    advance(end);
  }

  void tag() {
    const char kind = text_[at_ + 1];
    if (kind == '#') {
      const std::size_t end = text_.find("#}", at_ + 2);
      if (end == npos) fail("a comment has no end");
      const bool marked = end > at_ + 2 && (text_[end - 1] == '-' || text_[end - 1] == '+');
      return skip_end(marked ? end - 1 : end, true);
    }
    tokens_.push_back({Token::Kind::Begin, text_.substr(at_, 2), line_});
    const bool marked = at_ + 2 < text_.size() && (text_[at_ + 2] == '-' || text_[at_ + 2] == '+');
    const char closing = kind == '{' ? '}' : '%';
    at_ += marked ? 3 : 2;
    for (int open = 0;;) {
      advance(std::min(text_.find_first_not_of(kSpace, at_), text_.size()));
      if (at_ == text_.size()) fail("a tag has no end");
      const std::size_t end =
          at_ + (text_[at_] == '-' || (kind == '%' && text_[at_] == '+') ? 1 : 0);
      if (open == 0 && end + 1 < text_.size() && text_[end] == closing && text_[end + 1] == '}') {
        tokens_.push_back({Token::Kind::End, {}, line_});
        return skip_end(at_, kind == '%');
      }
      const char c = text_[at_];
      if (c == '\'' || c == '"') {
        string(c);
      } else if (is_digit(c)) {
        number();
      } else if (is_name(c)) {
        std::size_t stop = at_;
        while (stop < text_.size() && is_name(text_[stop])) ++stop;
        push(Token::Kind::Name, stop);
      } else {
        constexpr std::array<std::string_view, 26> kOperators = {
            "==", "!=", ">=", "<=", "//", "**", "+", "-", "/", "*", "%", "~", "[",
            "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
        const auto* const found = std::ranges::find_if(kOperators, [&](std::string_view op) {
          return text_.compare(at_, op.size(), op) == 0;
        });
        if (found == kOperators.end())
          fail(fmt::format("unexpected '{}'", text_.substr(at_, utf8_length(c))));
        if (std::string_view("([{").find(c) != npos) ++open;
        if (std::string_view(")]}").find(c) != npos && --open < 0)
          fail(fmt::format("'{}' closes nothing", c));
        push(Token::Kind::Operator, at_ + found->size());
      }
    }
  }

  void push(Token::Kind kind, std::size_t stop) {
    tokens_.push_back({kind, text_.substr(at_, stop - at_), line_});
    at_ = stop;
  }

  void number() {
    std::size_t stop = at_;
    bool whole = true;
    const auto digits = [&] {
      while (stop < text_.size() && is_digit(text_[stop])) ++stop;
    };
    digits();
    if (stop + 1 < text_.size() && text_[stop] == '.' && is_digit(text_[stop + 1]))
      whole = false, ++stop, digits();
    const auto is_at = [&](std::size_t i, std::string_view set) {
      return i < text_.size() && set.find(text_[i]) != npos;
    };
    const std::size_t sign = is_at(stop + 1, "+-") ? 1 : 0;
    if (is_at(stop, "eE") && is_at(stop + 1 + sign, "0123456789"))
      whole = false, stop += 1 + sign, digits();
    push(whole ? Token::Kind::Integer : Token::Kind::Float, stop);
  }

  void string(char quote) {
    std::string out;
    std::size_t i = at_ + 1;
    for (; i < text_.size() && text_[i] != quote; ++i) {
      if (text_[i] != '\\' || i + 1 == text_.size()) {
        out += text_[i];
        continue;
      }
      const char c = text_[++i];
      constexpr std::string_view kLetters = "nrtabfv\\'\"", kMeanings = "\n\r\t\a\b\f\v\\'\"";
      const std::size_t width = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (const std::size_t letter = kLetters.find(c); letter != npos) {
        out += kMeanings[letter];
      } else if (width > 0) {
        unsigned point = 0;
        const char* const first = text_.data() + i + 1;
        const char* const last = text_.data() + std::min(i + 1 + width, text_.size());
        const auto [end, error] = std::from_chars(first, last, point, 16);
        const bool is_point = point < 0xD800 || (point > 0xDFFF && point <= 0x10FFFF);
        if (error != std::errc() || end != first + width || !is_point)
          fail(fmt::format("'\\{}' needs {} hexadecimal digits of a character", c, width));
        append_utf8(point, out);
        i += width;
      } else if (c != '\n') {
        out += {'\\', c};
      }
    }
    if (i >= text_.size()) fail("a string has no end");
    tokens_.push_back({Token::Kind::String, std::move(out), line_});
    advance(i + 1);
  }

  const std::string& name_;
  std::string text_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool starts_line_ = true;
  std::vector<Token> tokens_;
};

using Kind = Expression::Kind;

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& name)
      : name_(name), tokens_(std::move(tokens)) {
    tokens_.push_back(
        {Token::Kind::End, "the end of the template", tokens_.empty() ? 1 : tokens_.back().line});
  }

  Block template_block() {
    Block block = parse_block({});
    if (!at_end()) fail(fmt::format("'{}' ends nothing", ahead(1).text));
    return block;
  }

 private:
  struct Level {
    explicit Level(Parser& p) : parser(p) {
      if (++parser.levels_ > kMostDepth)
        parser.fail(fmt::format("more than {} levels of nesting", kMostDepth));
    }
    ~Level() { --parser.levels_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    Parser& parser;
  };

  [[noreturn]] void fail(const std::string& why) const {
    throw InvalidArgument("{}:{}: {}", name_, now().line, why);
  }
  [[noreturn]] void expected(std::string_view what) const {
    fail(fmt::format("expected {}, found {}", what,
                     now().kind == Token::Kind::End && now().text.empty()
                         ? "the end of the tag"
                         : "'" + now().text + "'"));
  }

  bool at_end() const { return at_ + 1 >= tokens_.size(); }
  const Token& ahead(std::size_t n) const { return tokens_[std::min(at_ + n, tokens_.size() - 1)]; }
  const Token& now() const { return ahead(0); }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is(Token::Kind kind, std::string_view text) const {
    return now().kind == kind && now().text == text;
  }
  bool is_word(std::string_view text) const { return is(Token::Kind::Name, text); }
  bool skip(Token::Kind kind, std::string_view text) {
    const bool found = is(kind, text);
    if (found) ++at_;
    return found;
  }
  bool skip_word(std::string_view text) { return skip(Token::Kind::Name, text); }
  bool skip_operator(std::string_view text) { return skip(Token::Kind::Operator, text); }
  void need(std::string_view text) {
    if (!skip_operator(text)) expected(fmt::format("'{}'", text));
  }
  void need_end() {
    if (now().kind != Token::Kind::End || at_end()) expected("the end of the tag");
    ++at_;
  }
  std::string need_name() {
    if (now().kind != Token::Kind::Name) expected("a name");
    return take().text;
  }

  // ---- statements ----

  // Statements up to {% one of `ends`, whose name is then the current token.
  Block parse_block(std::initializer_list<std::string_view> ends) {
    const Level level(*this);
    Block block;
    while (!at_end()) {
      const Token token = take();
      Statement statement;
      if (token.kind == Token::Kind::Text) {
        statement.text = token.text;
      } else if (token.text == "{{") {
        statement.kind = Statement::Kind::Output;
        statement.value = parse_tuple();
        need_end();
      } else {
        if (now().kind != Token::Kind::Name) expected("a statement");
        if (std::ranges::find(ends, now().text) != ends.end()) return block;
        if (ends.size() == 0 && now().text.starts_with("end")) return --at_, std::move(block);
        statement = parse_statement();
      }
      statement.line = token.line;
      block.push_back(std::move(statement));
    }
    if (ends.size() > 0) fail(fmt::format("a block has no {{% {} %}}", *(ends.end() - 1)));
    return block;
  }

  Block parse_body(std::string_view end) {
    need_end();
    Block body = parse_block({end});
    ++at_;
    need_end();
    return body;
  }

  Statement parse_statement() {
    const std::string word = take().text;
    Statement s;
    if (word == "if") {
      s.kind = Statement::Kind::If;
      ExpressionPtr condition = parse_expression();
      for (;;) {
        need_end();
        Block body = parse_block({"elif", "else", "endif"});
        s.branches.push_back({std::move(condition), std::move(body)});
        const std::string next = take().text;
        if (next == "endif") break;
        if (next == "else") {
          s.branches.push_back({nullptr, parse_body("endif")});
          return s;
        }
        condition = parse_expression();
      }
      need_end();
    } else if (word == "for") {
      parse_for(s);
    } else if (word == "set") {
      s.kind = Statement::Kind::Set;
      s.targets = parse_targets();
      if (skip_operator("=")) {
        s.value = parse_tuple();
        need_end();
      } else {
        s.body = parse_body("endset");
      }
    } else if (word == "macro") {
      s.kind = Statement::Kind::Macro;
      s.macro = std::make_unique<Macro>();
      s.macro->name = need_name();
      need("(");
      while (!skip_operator(")")) {
        if (!s.macro->parameters.empty()) need(",");
        s.macro->parameters.push_back(need_name());
        if (skip_operator("=")) {
          s.macro->defaults.push_back(parse_expression());
        } else if (!s.macro->defaults.empty()) {
          fail("a parameter without a default follows one with a default");
        }
      }
      s.macro->body = parse_body("endmacro");
    } else if (word == "generation") {
      s.kind = Statement::Kind::Generation;
      s.body = parse_body("endgeneration");
    } else if (word == "break" || word == "continue") {
      s.kind = word == "break" ? Statement::Kind::Break : Statement::Kind::Continue;
      if (loops_ == 0) fail(fmt::format("'{}' outside of a loop", word));
      need_end();
    } else {
      throw Unsupported("{}:{}: this build has no template statement '{}'", name_, now().line,
                        word);
    }
    return s;
  }

  void parse_for(Statement& s) {
    s.kind = Statement::Kind::For;
    s.targets = parse_targets();
    if (!skip_word("in")) expected("'in'");
    s.value = parse_tuple(false);
    if (skip_word("if")) s.filter = parse_expression();
    need_end();
    ++loops_;
    s.body = parse_block({"else", "endfor"});
    --loops_;
    if (take().text == "else") {
      s.branches.push_back({nullptr, parse_body("endfor")});
    } else {
      need_end();
    }
  }

  std::vector<std::string> parse_targets() {
    std::vector<std::string> targets;
    const bool enclosed = skip_operator("(");
    do {
      targets.push_back(need_name());
      if (skip_operator(".")) targets.back() += "." + need_name();
    } while (skip_operator(","));
    if (enclosed) need(")");
    return targets;
  }

  // ---- expressions, by rising precedence ----

  ExpressionPtr node(Kind kind, std::string name, std::vector<ExpressionPtr> operands) {
    auto e = std::make_unique<Expression>();
    e->kind = kind;
    e->line = now().line;
    e->name = std::move(name);
    for (const ExpressionPtr& operand : operands)
      if (operand) e->depth = std::max(e->depth, operand->depth + 1);
    if (e->depth > kMostDepth)
      fail(fmt::format("an expression of more than {} levels", kMostDepth));
    e->operands = std::move(operands);
    return e;
  }
  template <typename... Operands>
  ExpressionPtr make(Kind kind, std::string name, Operands... operands) {
    std::vector<ExpressionPtr> list;
    (list.push_back(std::move(operands)), ...);
    return node(kind, std::move(name), std::move(list));
  }
  ExpressionPtr literal(Value value) {
    ExpressionPtr e = node(Kind::Literal, {}, {});
    e->value = std::move(value);
    return e;
  }

  // One expression, or several with commas between: a list.
  ExpressionPtr parse_tuple(bool with_condition = true) {
    ExpressionPtr first = with_condition ? parse_expression() : parse_or();
    if (!is(Token::Kind::Operator, ",")) return first;
    std::vector<ExpressionPtr> all;
    all.push_back(std::move(first));
    while (skip_operator(",")) {
      if (now().kind == Token::Kind::End || is(Token::Kind::Operator, ")")) break;
      all.push_back(with_condition ? parse_expression() : parse_or());
    }
    return node(Kind::List, {}, std::move(all));
  }

  ExpressionPtr parse_expression() {
    const Level level(*this);
    ExpressionPtr value = parse_or();
    while (skip_word("if")) {
      ExpressionPtr condition = parse_or();
      ExpressionPtr other = skip_word("else") ? parse_expression() : nullptr;
      value = make(Kind::If, {}, std::move(value), std::move(condition), std::move(other));
    }
    return value;
  }

  ExpressionPtr parse_or() {
    ExpressionPtr left = parse_and();
    while (skip_word("or")) left = make(Kind::Binary, "or", std::move(left), parse_and());
    return left;
  }
  ExpressionPtr parse_and() {
    ExpressionPtr left = parse_not();
    while (skip_word("and")) left = make(Kind::Binary, "and", std::move(left), parse_not());
    return left;
  }
  ExpressionPtr parse_not() {
    const Level level(*this);
    if (skip_word("not")) return make(Kind::Unary, "not", parse_not());
    return parse_comparison();
  }

  ExpressionPtr parse_comparison() {
    std::vector<ExpressionPtr> operands;
    std::vector<std::string> operators;
    operands.push_back(parse_operators(0));
    for (;;) {
      const Token& token = now();
      const bool negated =
          is_word("not") && ahead(1).kind == Token::Kind::Name && ahead(1).text == "in";
      const bool compares = token.kind == Token::Kind::Operator &&
                            (token.text == "==" || token.text == "!=" || token.text == "<" ||
                             token.text == "<=" || token.text == ">" || token.text == ">=");
      if (!negated && !compares && !is_word("in")) break;
      if (negated) ++at_;
      operators.push_back(negated ? "not in" : token.text);
      ++at_;
      operands.push_back(parse_operators(0));
    }
    if (operators.empty()) return std::move(operands.front());
    ExpressionPtr e = node(Kind::Compare, {}, std::move(operands));
    e->names = std::move(operators);
    return e;
  }

  ExpressionPtr parse_operators(std::size_t level) {
    static const std::vector<std::vector<std::string_view>> kLevels = {
        {"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
    if (level == kLevels.size()) return parse_unary(true);
    ExpressionPtr left = parse_operators(level + 1);
    while (now().kind == Token::Kind::Operator &&
           std::ranges::find(kLevels[level], now().text) != kLevels[level].end()) {
      std::string name = take().text;
      left = make(Kind::Binary, std::move(name), std::move(left), parse_operators(level + 1));
    }
    return left;
  }

  ExpressionPtr parse_unary(bool with_filters) {
    const Level level(*this);
    const bool is_sign = is(Token::Kind::Operator, "-") || is(Token::Kind::Operator, "+");
    ExpressionPtr e;
    if (is_sign) {
      std::string sign = take().text;
      e = make(Kind::Unary, std::move(sign), parse_unary(false));
    } else {
      e = parse_primary();
    }
    e = parse_postfix(std::move(e));
    return with_filters ? parse_filters(std::move(e)) : std::move(e);
  }

  ExpressionPtr parse_primary() {
    const Token token = take();
    switch (token.kind) {
      case Token::Kind::Name:
        if (token.text == "true" || token.text == "True") return literal(true);
        if (token.text == "false" || token.text == "False") return literal(false);
        if (token.text == "none" || token.text == "None") return literal(Value::Data(None{}));
        return make(Kind::Name, token.text);
      case Token::Kind::String: {
        std::string text = token.text;
        while (now().kind == Token::Kind::String) text += take().text;
        return literal(std::move(text));
      }
      case Token::Kind::Integer: {
        std::int64_t value = 0;
        const char* const last = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), last, value).ptr != last)
          fail(fmt::format("the number {} is too large", token.text));
        return literal(value);
      }
      case Token::Kind::Float:
        return literal(Value::Data(std::strtod(token.text.c_str(), nullptr)));
      default:
        break;
    }
    if (token.kind == Token::Kind::Operator && token.text == "(") {
      if (skip_operator(")")) return node(Kind::List, {}, {});
      ExpressionPtr e = parse_tuple();
      need(")");
      return e;
    }
    const bool is_dict = token.kind == Token::Kind::Operator && token.text == "{";
    if (!is_dict && (token.kind != Token::Kind::Operator || token.text != "[")) {
      --at_;
      expected("a value");
    }
    std::vector<ExpressionPtr> all;
    const std::string_view closing = is_dict ? "}" : "]";
    while (!skip_operator(closing)) {
      if (!all.empty()) need(",");
      if (skip_operator(closing)) break;
      all.push_back(parse_expression());
      if (!is_dict) continue;
      need(":");
      all.push_back(parse_expression());
    }
    return node(is_dict ? Kind::Dict : Kind::List, {}, std::move(all));
  }

  ExpressionPtr parse_postfix(ExpressionPtr e) {
    for (;;) {
      if (skip_operator(".")) {
        if (now().kind == Token::Kind::Integer) {
          e = make(Kind::Item, {}, std::move(e), parse_primary());
        } else {
          std::string name = need_name();
          e = make(Kind::Attribute, std::move(name), std::move(e));
        }
      } else if (skip_operator("[")) {
        e = parse_subscript(std::move(e));
      } else if (is(Token::Kind::Operator, "(")) {
        e = parse_arguments(Kind::Call, {}, std::move(e));
      } else {
        return e;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr e) {
    std::vector<ExpressionPtr> parts;
    parts.push_back(std::move(e));
    bool is_slice = false;
    ExpressionPtr part;
    while (!is(Token::Kind::Operator, "]")) {
      if (skip_operator(":")) {
        is_slice = true;
        parts.push_back(std::move(part));
      } else if (part || parts.size() > 3) {
        expected("']'");
      } else {
        part = parse_expression();
      }
    }
    need("]");
    parts.push_back(std::move(part));
    if (!is_slice && !parts[1]) expected("an index");
    if (!is_slice) return node(Kind::Item, {}, std::move(parts));
    if (parts.size() > 4) fail("a slice has three parts at most");
    parts.resize(4);
    return node(Kind::Slice, {}, std::move(parts));
  }

  // "(a, b, c=d)"
  ExpressionPtr parse_arguments(Kind kind, std::string name, ExpressionPtr target) {
    std::vector<ExpressionPtr> operands;
    operands.push_back(std::move(target));
    std::vector<std::string> keywords;
    need("(");
    while (!skip_operator(")")) {
      if (operands.size() > 1) need(",");
      if (skip_operator(")")) break;
      const bool is_keyword = now().kind == Token::Kind::Name &&
                              ahead(1).kind == Token::Kind::Operator && ahead(1).text == "=";
      if (is_keyword) {
        keywords.push_back(take().text);
        ++at_;
      } else if (!keywords.empty()) {
        fail("a positional argument follows a keyword argument");
      }
      operands.push_back(parse_expression());
    }
    ExpressionPtr e = node(kind, std::move(name), std::move(operands));
    e->names = std::move(keywords);
    return e;
  }

  ExpressionPtr parse_filters(ExpressionPtr e) {
    for (;;) {
      if (skip_operator("|")) {
        std::string name = need_name();
        e = is(Token::Kind::Operator, "(")
                ? parse_arguments(Kind::Filter, std::move(name), std::move(e))
                : make(Kind::Filter, std::move(name), std::move(e));
      } else if (skip_word("is")) {
        const bool negated = skip_word("not");
        std::string name = need_name();
        const Token& next = now();
        const bool starts_value =
            next.kind == Token::Kind::String || next.kind == Token::Kind::Integer ||
            next.kind == Token::Kind::Float ||
            (next.kind == Token::Kind::Operator && (next.text == "[" || next.text == "{")) ||
            (next.kind == Token::Kind::Name && next.text != "else" && next.text != "or" &&
             next.text != "and" && next.text != "if" && next.text != "is" && next.text != "not" &&
             next.text != "in");
        if (is(Token::Kind::Operator, "(")) {
          e = parse_arguments(Kind::Test, std::move(name), std::move(e));
        } else if (starts_value) {
          e = make(Kind::Test, std::move(name), std::move(e), parse_postfix(parse_primary()));
        } else {
          e = make(Kind::Test, std::move(name), std::move(e));
        }
        if (negated) e = make(Kind::Unary, "not", std::move(e));
      } else if (is(Token::Kind::Operator, "(")) {
        e = parse_arguments(Kind::Call, {}, std::move(e));
      } else {
        return e;
      }
    }
  }

  const std::string& name_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int levels_ = 0, loops_ = 0;
};

}  // namespace

Block parse_template(std::string_view text, const std::string& name) {
  constexpr std::size_t kMostBytes = 1 << 20;
  require(text.size() <= kMostBytes, "{}: a chat template has at most {} bytes, this one {}", name,
          kMostBytes, text.size());
  require(find_malformed_utf8(text) == text.npos, "{}: byte {} is not valid UTF-8", name,
          find_malformed_utf8(text));
  return Parser(Lexer(text, name).run(), name).template_block();
}

}  // namespace tessera::io::chat
