#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/chat/value.h"

namespace tessera::io::chat {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    Literal,    ///< value
    Name,       ///< name
    List,       ///< operands
    Dict,       ///< operands: key, value, key, value, ...
    Attribute,  ///< operands[0].name
    Item,       ///< operands[0][operands[1]]
    Slice,      ///< operands[0][operands[1]:operands[2]:operands[3]], absent ones null
    Call,       ///< operands[0](operands[1], ..., keywords)
    Filter,     ///< operands[0] | name(operands[1], ..., keywords)
    Test,       ///< operands[0] is name(operands[1], ...)
    Unary,      ///< name: not, -, +
    Binary,     ///< name: and, or, ~, +, -, *, /, //, %, **
    Compare,    ///< operands[0] names[0] operands[1] names[1] operands[2] ...
    If,         ///< operands: value, condition, value otherwise or null
  };
  Kind kind = Kind::Literal;
  int line = 0;
  int depth = 1;
  std::string name = {};
  Value value = {};
  std::vector<ExpressionPtr> operands = {};
  /// Keywords of the last operands of a call or filter, or operators of a comparison.
  std::vector<std::string> names = {};
};

struct Statement;
using Block = std::vector<Statement>;

/// A branch of an if; the one of an else has no condition.
struct Branch {
  ExpressionPtr condition;
  Block body;
};

struct Macro {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExpressionPtr> defaults;  ///< of the last parameters
  Block body;
};

struct Statement {
  enum class Kind { Text, Output, Set, If, For, Macro, Generation, Break, Continue };
  Kind kind = Kind::Text;
  int line = 0;
  std::string text;                  ///< of Text
  std::vector<std::string> targets;  ///< of Set and For: names, or "object.attribute"
  ExpressionPtr value;               ///< of Output, Set (null: the body's text) and For
  ExpressionPtr filter;              ///< of For: its condition, or null
  std::vector<Branch> branches;      ///< of If; of For: one, for an empty sequence
  Block body;
  std::unique_ptr<Macro> macro;
};

/// Parses a template as jinja2 with trim_blocks and lstrip_blocks does.
/// @param name  of the template, for errors
/// @throws InvalidArgument on a syntax error, Unsupported on a statement that chat templates do not
///   use; both name template and line
Block parse_template(std::string_view text, const std::string& name);

}  // namespace tessera::io::chat
