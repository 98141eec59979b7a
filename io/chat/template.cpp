#include "io/chat/template.h"

#include <array>
#include <cmath>
#include <deque>
#include <iomanip>
#include <sstream>

#include "io/chat/builtins.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io::chat {
namespace {

constexpr std::int64_t kMostWork = 100'000'000;      // see Budget
constexpr std::size_t kNode = 32, kIteration = 400;  // units of work, about nanoseconds
constexpr int kMostCalls = 400;                      // of nested nodes and calls
constexpr std::int64_t kMostRange = 100'000;         // elements, as in jinja2's sandbox

constexpr std::array<std::string_view, 5> kGlobals = {"range", "dict", "namespace",
                                                      "raise_exception", "strftime_now"};

class Renderer {
 public:
  Renderer(const std::string& name, const Dict& variables, const std::tm& now)
      : name_(name), variables_(variables), now_(now) {}

  Rendering run(const Block& block) {
    try {
      execute(block);
    } catch (const Unsupported& error) {
      throw Unsupported("{}:{}: {}", name_, line_, error.what());
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("{}:{}: {}", name_, line_, error.what());
    }
    return {std::move(out_), std::move(generated_)};
  }

 private:
  enum class Flow { Next, Break, Continue };
  using Kind = Expression::Kind;

  struct Depth {
    explicit Depth(Renderer& r) : renderer(r) {
      renderer.budget_.spend(kNode);
      require(++renderer.depth_ <= kMostCalls, "the template calls itself too deeply");
    }
    ~Depth() { --renderer.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    Renderer& renderer;
  };

  // ---- statements ----

  Flow execute(const Block& block) {
    for (const Statement& statement : block)
      if (const Flow flow = execute(statement); flow != Flow::Next) return flow;
    return Flow::Next;
  }

  Flow execute(const Statement& s) {
    const Depth depth(*this);
    line_ = s.line;
    switch (s.kind) {
      case Statement::Kind::Text:
        write(s.text);
        break;
      case Statement::Kind::Output:
        write(to_text(evaluate(*s.value), budget_));
        break;
      case Statement::Kind::Set:
        assign(s.targets, s.value ? evaluate(*s.value) : Value(captured(s.body, {})));
        break;
      case Statement::Kind::If:
        for (const Branch& branch : s.branches)
          if (!branch.condition || truth(evaluate(*branch.condition))) return execute(branch.body);
        break;
      case Statement::Kind::For:
        loop(s);
        break;
      case Statement::Kind::Macro:
        slot(frames_.back(), s.macro->name) = Value::Data(Callable{s.macro->name, s.macro.get()});
        break;
      case Statement::Kind::Generation: {
        require<Unsupported>(captures_ == 0, "{{% generation %}} within a macro or a set block");
        const std::size_t begin = out_.size();
        const std::string text = captured(s.body, {});
        write(text);
        generated_.emplace_back(begin, out_.size());
        break;
      }
      case Statement::Kind::Break:
        return Flow::Break;
      case Statement::Kind::Continue:
        return Flow::Continue;
    }
    return Flow::Next;
  }

  void write(const std::string& text) {
    budget_.spend(text.size());
    out_ += text;
  }

  // The text of a block in a scope of its own.
  std::string captured(const Block& body, Dict scope) {
    std::string outer;
    std::swap(outer, out_);
    ++captures_;
    frames_.push_back(std::move(scope));
    execute(body);
    frames_.pop_back();
    --captures_;
    std::swap(outer, out_);
    return outer;
  }

  void assign(const std::vector<std::string>& targets, const Value& value) {
    if (targets.size() == 1) return assign(targets.front(), value);
    const List values = elements(value, budget_);
    require(values.size() == targets.size(), "{} values for {} names", values.size(),
            targets.size());
    for (std::size_t i = 0; i < values.size(); ++i) assign(targets[i], values[i]);
  }

  void assign(const std::string& target, const Value& value) {
    const std::size_t dot = target.find('.');
    if (dot == target.npos) {
      slot(frames_.back(), target) = value;
      return;
    }
    const Value object = lookup(target.substr(0, dot));
    const auto* space = std::get_if<Namespace>(&object.data);
    require(space != nullptr, "'{}' is {}; only attributes of a namespace can be set", target,
            object.type());
    slot(*space->items, target.substr(dot + 1)) = value;
  }

  void loop(const Statement& s) {
    const List all = elements(evaluate(*s.value), budget_);
    List chosen;
    if (s.filter) {
      for (const Value& element : all) {
        budget_.spend(kIteration);
        frames_.emplace_back();
        assign(s.targets, element);
        if (truth(evaluate(*s.filter))) chosen.push_back(element);
        frames_.pop_back();
      }
    }
    const List& list = s.filter ? chosen : all;
    if (list.empty() && !s.branches.empty()) {
      execute(s.branches.front().body);
      return;
    }
    const std::int64_t size = std::ssize(list);
    for (std::int64_t i = 0; i < size; ++i) {
      budget_.spend(kIteration);
      const auto at = [&](std::int64_t j) {
        return j < 0 || j >= size ? Value() : list[static_cast<std::size_t>(j)];
      };
      frames_.push_back({{"loop", Dict{{"index", i + 1},
                                       {"index0", i},
                                       {"revindex", size - i},
                                       {"revindex0", size - i - 1},
                                       {"first", i == 0},
                                       {"last", i + 1 == size},
                                       {"length", size},
                                       {"previtem", at(i - 1)},
                                       {"nextitem", at(i + 1)}}}});
      assign(s.targets, at(i));
      const Flow flow = execute(s.body);
      frames_.pop_back();
      if (flow == Flow::Break) break;
    }
  }

  // ---- expressions ----

  Value lookup(const std::string& name) const {
    for (std::size_t i = frames_.size(); i-- > base_;)
      if (const Value* found = find(frames_[i], name)) return *found;
    if (const Value* found = find(frames_.front(), name)) return *found;
    if (const Value* found = find(variables_, name)) return *found;
    if (std::ranges::find(kGlobals, name) != kGlobals.end()) return Value::Data(Callable{name});
    return Value::Data(Undefined{name});
  }

  Value evaluate(const Expression& e) {
    const Depth depth(*this);
    line_ = e.line;
    const auto operand = [&](std::size_t i) { return evaluate(*e.operands[i]); };
    switch (e.kind) {
      case Kind::Literal:
        return e.value;
      case Kind::Name:
        return lookup(e.name);
      case Kind::List: {
        List list;
        for (std::size_t i = 0; i < e.operands.size(); ++i) list.push_back(operand(i));
        return list;
      }
      case Kind::Dict: {
        Dict dict;
        for (std::size_t i = 0; i < e.operands.size(); i += 2) {
          const Value key = operand(i);
          require(key.string() != nullptr, "keys of dicts are strings here, found {}", key.type());
          slot(dict, *key.string()) = operand(i + 1);
        }
        return dict;
      }
      case Kind::Attribute:
        return attribute(operand(0), e.name);
      case Kind::Item: {
        const Value value = operand(0);
        return item(value, operand(1), budget_);
      }
      case Kind::Slice:
        return slice(e);
      case Kind::Call: {
        const Value callee = operand(0);
        const Arguments arguments = arguments_of(e);
        return call(callee, arguments, e.line);
      }
      case Kind::Filter: {
        const Value value = operand(0);
        const Arguments arguments = arguments_of(e);
        line_ = e.line;
        return apply_filter(e.name, value, arguments, budget_);
      }
      case Kind::Test: {
        const Value value = operand(0);
        return apply_test(e.name, value, arguments_of(e), budget_);
      }
      case Kind::Unary:
        return e.name == "not" ? Value(!truth(operand(0)))
                               : binary(e.name, std::int64_t{0}, operand(0));
      case Kind::Binary: {
        Value left = operand(0);
        if (e.name == "and") return truth(left) ? operand(1) : left;
        if (e.name == "or") return truth(left) ? left : operand(1);
        return binary(e.name, left, operand(1));
      }
      case Kind::Compare: {
        Value left = operand(0);
        for (std::size_t i = 0; i < e.names.size(); ++i) {
          Value right = operand(i + 1);
          if (!holds(e.names[i], left, right)) return false;
          left = std::move(right);
        }
        return true;
      }
      case Kind::If:
        if (truth(operand(1))) return operand(0);
        return e.operands[2] ? operand(2) : Value();
    }
    return {};
  }

  bool holds(const std::string& name, const Value& left, const Value& right) {
    if (name == "==") return equal(left, right, budget_);
    if (name == "!=") return !equal(left, right, budget_);
    if (name == "in") return contains(right, left, budget_);
    if (name == "not in") return !contains(right, left, budget_);
    const int order = compare(left, right, budget_);
    if (name == "<") return order < 0;
    if (name == "<=") return order <= 0;
    return name == ">" ? order > 0 : order >= 0;
  }

  Value binary(const std::string& name, const Value& left, const Value& right) {
    if (name == "~") {
      std::string text = to_text(left, budget_);
      return text += to_text(right, budget_);
    }
    if (name == "+" && left.string() && right.string()) {
      budget_.spend(left.string()->size() + right.string()->size());
      return *left.string() + *right.string();
    }
    if (name == "+" && left.list() && right.list()) {
      List list = elements(left, budget_);
      for (const Value& element : elements(right, budget_)) list.push_back(element);
      return list;
    }
    if (name == "*" && (left.string() || left.list()) && right.integer())
      return repeated(left, *right.integer());
    double x = 0, y = 0;
    const bool numbers = as_number(left, x) && as_number(right, y);
    require(numbers, "{} and {} have no '{}'", left.type(), right.type(), name);
    const bool floats =
        std::holds_alternative<double>(left.data) || std::holds_alternative<double>(right.data);
    require(y != 0 || (name != "/" && name != "//" && name != "%"), "division by zero");
    if (name == "/") return Value::Data(x / y);
    if (floats || (name == "**" && y < 0)) {
      if (name == "+") return Value::Data(x + y);
      if (name == "-") return Value::Data(x - y);
      if (name == "*") return Value::Data(x * y);
      if (name == "**") return Value::Data(std::pow(x, y));
      const double quotient = std::floor(x / y);
      return Value::Data(name == "//" ? quotient : x - quotient * y);
    }
    const auto whole = [](const Value& v) {
      return v.integer() ? *v.integer() : std::int64_t{truth(v)};
    };
    return integers(name, whole(left), whole(right));
  }

  static Value integers(const std::string& name, std::int64_t x, std::int64_t y) {
    std::int64_t result = 0;
    bool overflows = false;
    if (name == "+") {
      overflows = __builtin_add_overflow(x, y, &result);
    } else if (name == "-") {
      overflows = __builtin_sub_overflow(x, y, &result);
    } else if (name == "*") {
      overflows = __builtin_mul_overflow(x, y, &result);
    } else if (name == "**") {
      const double power = std::pow(static_cast<double>(x), static_cast<double>(y));
      overflows = std::abs(power) >= 0x1p53;
      result = overflows ? 0 : static_cast<std::int64_t>(power);
    } else if (y == -1) {
      overflows = name == "//" && __builtin_sub_overflow(std::int64_t{0}, x, &result);
    } else {  // rounded down, as in Python
      const std::int64_t rest = x % y, below = rest != 0 && (rest < 0) != (y < 0) ? 1 : 0;
      result = name == "//" ? x / y - below : rest + below * y;
    }
    require(!overflows, "a whole number is too large");
    return result;
  }

  Value repeated(const Value& value, std::int64_t times) {
    times = std::max<std::int64_t>(times, 0);
    const auto size =
        static_cast<double>(value.string() ? std::ssize(*value.string()) : length(value));
    budget_.spend(static_cast<std::size_t>(std::min(size * static_cast<double>(times), 1e12)));
    std::string text;
    List list;
    for (std::int64_t i = 0; size > 0 && i < times; ++i) {
      if (value.string()) {
        text += *value.string();
      } else {
        list.insert(list.end(), value.list()->begin(), value.list()->end());
      }
    }
    return value.string() ? Value(std::move(text)) : Value(std::move(list));
  }

  Value slice(const Expression& e) {
    const Value value = evaluate(*e.operands[0]);
    require(value.string() || value.list(), "{} has no slices", value.type());
    const auto part = [&](std::size_t i, std::int64_t otherwise) {
      const Value given = e.operands[i] ? evaluate(*e.operands[i]) : Value(Value::Data(None{}));
      if (given.is_none()) return otherwise;
      require(given.integer() != nullptr, "a slice has ints, found {}", given.type());
      return *given.integer();
    };
    const std::int64_t size = length(value), step = part(3, 1);
    require(step != 0, "a slice has a step of 0");
    const auto bound = [&](std::size_t i, std::int64_t otherwise) {
      const std::int64_t at = part(i, otherwise);
      const std::int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
      if (!e.operands[i]) return otherwise;
      return std::clamp(at < 0 ? at + size : at, low, high);
    };
    const std::int64_t first = bound(1, step > 0 ? 0 : size - 1);
    const std::int64_t last = bound(2, step > 0 ? size : -1);
    if (value.string() && step == 1) return characters(*value.string(), first, last);
    const List all = elements(value, budget_);
    List out;
    for (std::int64_t i = first; step > 0 ? i < last : i > last; i += step) {
      out.push_back(all[static_cast<std::size_t>(i)]);
      if (step > size || step < -size) break;
    }
    return value.string() ? apply_filter("join", out, {}, budget_) : Value(std::move(out));
  }

  Value characters(const std::string& text, std::int64_t first, std::int64_t last) {
    budget_.spend(text.size());
    std::size_t begin = 0, end = 0;
    for (std::int64_t i = 0; i < last && end < text.size(); ++i) {
      if (i < first) begin += utf8_length(text[begin]);
      end += utf8_length(text[end]);
    }
    return end > begin ? text.substr(begin, end - begin) : std::string();
  }

  Arguments arguments_of(const Expression& e) {
    Arguments arguments;
    const std::size_t positional = e.operands.size() - e.names.size();
    for (std::size_t i = 1; i < e.operands.size(); ++i) {
      Value value = evaluate(*e.operands[i]);
      if (i < positional)
        arguments.values.push_back(std::move(value));
      else
        arguments.named.emplace_back(e.names[i - positional], std::move(value));
    }
    return arguments;
  }

  Value call(const Value& callee, const Arguments& arguments, int line) {
    line_ = line;
    if (const auto* undefined = std::get_if<Undefined>(&callee.data))
      throw InvalidArgument("'{}' is undefined", undefined->name);
    const auto* const function = std::get_if<Callable>(&callee.data);
    require(function != nullptr, "{} is not a function", callee.type());
    if (function->macro != nullptr) return call_macro(*function->macro, arguments);
    if (function->self) return call_method(*function->self, function->name, arguments, budget_);
    if (function->name == "range") return range(arguments);
    if (function->name == "raise_exception")
      throw InvalidArgument("the template refuses: {}", to_text(arguments.need(0), budget_));
    if (function->name == "strftime_now") return formatted_date(arguments.text(0, "format", ""));
    Dict items;
    if (!arguments.values.empty()) {
      require(arguments.need(0).dict() != nullptr, "{}: expected a dict, found {}", function->name,
              arguments.need(0).type());
      items = *arguments.need(0).dict();
    }
    for (const auto& [key, value] : arguments.named) slot(items, key) = value;
    if (function->name == "dict") return items;
    return Value::Data(Namespace{&spaces_.emplace_back(std::move(items))});
  }

  Value call_macro(const Macro& macro, const Arguments& arguments) {
    const std::size_t count = macro.parameters.size();
    require(arguments.values.size() <= count, "macro '{}' has {} parameters, {} were given",
            macro.name, count, arguments.values.size());
    for (const auto& [key, value] : arguments.named)
      require(std::ranges::find(macro.parameters, key) != macro.parameters.end(),
              "macro '{}' has no parameter '{}'", macro.name, key);
    const std::size_t outer = std::exchange(base_, frames_.size());
    Dict scope;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t first_default = count - macro.defaults.size();
      const Value* const given = arguments.get(i, macro.parameters[i]);
      Value value = Value::Data(Undefined{macro.parameters[i]});
      if (given != nullptr) value = *given;
      if (given == nullptr && i >= first_default)
        value = evaluate(*macro.defaults[i - first_default]);
      scope.emplace_back(macro.parameters[i], std::move(value));
    }
    std::string text = captured(macro.body, std::move(scope));
    base_ = outer;
    return text;
  }

  Value range(const Arguments& a) {
    const auto whole = [&](std::size_t i, std::int64_t otherwise) {
      if (i >= a.values.size()) return otherwise;
      require(a.values[i].integer() != nullptr, "range: expected an int, found {}",
              a.values[i].type());
      return *a.values[i].integer();
    };
    (void)a.need(0);
    const bool has_start = a.values.size() > 1;
    const std::int64_t start = has_start ? whole(0, 0) : 0;
    const std::int64_t stop = whole(has_start ? 1 : 0, 0), step = whole(2, 1);
    require(step != 0, "range: the step is 0");
    List list;
    std::int64_t i = start;
    for (bool ends = false; !ends && (step > 0 ? i < stop : i > stop);) {
      budget_.spend(sizeof(Value));
      require(std::ssize(list) < kMostRange, "range: more than {} elements", kMostRange);
      list.emplace_back(i);
      ends = __builtin_add_overflow(i, step, &i);
    }
    return list;
  }

  Value formatted_date(const std::string& format) const {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    for (std::size_t i = 0; i < format.size(); ++i) {
      // glibc's %-d: without leading zeros or spaces.
      const bool bare = format.compare(i, 2, "%-") == 0;
      if (bare) ++i;
      if ((!bare && format[i] != '%') || i + 1 == format.size()) {
        text << format[i];
        continue;
      }
      std::ostringstream field;
      field.imbue(std::locale::classic());
      field << std::put_time(&now_, std::string{'%', format[++i]}.c_str());
      const std::string value = field.str();
      const std::size_t first = bare ? value.find_first_not_of("0 ") : 0;
      text << value.substr(std::min(first, value.size() - (value.empty() ? 0 : 1)));
    }
    return text.str();
  }

  const std::string& name_;
  const Dict& variables_;
  const std::tm& now_;
  Budget budget_{kMostWork};
  std::vector<Dict> frames_{1};  // scopes; the first one is the template's
  std::size_t base_ = 0;         // first scope of the macro that runs
  std::deque<Dict> spaces_;      // of Namespace
  std::string out_;
  std::vector<std::pair<std::size_t, std::size_t>> generated_;
  int line_ = 1, depth_ = 0, captures_ = 0;
};

bool marks(const Block& block) {
  return std::ranges::any_of(block, [](const Statement& s) {
    return s.kind == Statement::Kind::Generation || marks(s.body) ||
           std::ranges::any_of(s.branches, [](const Branch& b) { return marks(b.body); });
  });
}

}  // namespace

Template::Template(std::string_view text, std::string name)
    : name_(std::move(name)), block_(std::make_shared<const Block>(parse_template(text, name_))) {
  marks_generation_ = marks(*block_);
}

Rendering Template::render(const Dict& variables, const std::tm& now) const {
  return Renderer(name_, variables, now).run(*block_);
}

}  // namespace tessera::io::chat
