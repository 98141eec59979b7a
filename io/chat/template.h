#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/chat/syntax.h"

namespace tessera::io::chat {

struct Rendering {
  std::string text;
  /// Bytes [first, second) of `text` that {% generation %} marks, ascending.
  std::vector<std::pair<std::size_t, std::size_t>> generated;
};

/// A template in the part of Jinja that chat templates of Hugging Face use, with the functions and
/// settings that transformers gives them: trim_blocks, lstrip_blocks, break and continue, tojson,
/// raise_exception, strftime_now, {% generation %}. Immutable and thread-safe.
///
/// The work of a rendering is bounded: steps, depth, and bytes of text.
class Template {
 public:
  /// @param name  of the template in errors: its file
  /// @throws InvalidArgument on a syntax error, Unsupported; both name the line
  Template(std::string_view text, std::string name);

  bool marks_generation() const { return marks_generation_; }
  /// @param now  what strftime_now() formats
  /// @throws InvalidArgument naming the line: an error of the template, or a message that it raises
  Rendering render(const Dict& variables, const std::tm& now) const;

 private:
  std::string name_;
  bool marks_generation_;
  std::shared_ptr<const Block> block_;
};

}  // namespace tessera::io::chat
