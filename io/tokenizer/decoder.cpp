#include "io/tokenizer/decoder.h"

#include <charconv>

namespace tessera::io {
namespace {

struct ApplyDecoder {
  std::vector<std::string>& tokens;

  void operator()(BytesFromTokens) const {
    for (std::string& token : tokens) {
      if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') continue;
      unsigned byte = 0;
      const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
      if (error == std::errc() && end == token.data() + 5) token.assign(1, static_cast<char>(byte));
    }
  }
  void operator()(Fuse) const {
    std::string all;
    for (const std::string& token : tokens) all += token;
    tokens.assign(1, std::move(all));
  }
  void operator()(const StripEnds& step) const {
    for (std::string& token : tokens) {
      std::size_t begin = 0, end = token.size();
      for (std::size_t i = 0;
           i < step.start && token.compare(begin, step.text.size(), step.text) == 0; ++i)
        begin += step.text.size();
      for (std::size_t i = 0;
           i < step.stop && end - begin >= step.text.size() &&
           token.compare(end - step.text.size(), step.text.size(), step.text) == 0;
           ++i)
        end -= step.text.size();
      token = token.substr(begin, end - begin);
    }
  }
  void operator()(const SpaceFromMark& step) const {
    for (std::string& token : tokens) {
      const bool drops = step.drops_first && &token == tokens.data();
      token = replace_all(token, {.text = step.mark, .by = drops ? "" : " "});
    }
  }
  void operator()(const Replace& step) const {
    for (std::string& token : tokens) token = replace_all(token, step);
  }
};

}  // namespace

std::string Decoder::decode(std::vector<std::string> tokens) const {
  for (const DecoderStep& step : steps_) std::visit(ApplyDecoder{tokens}, step);
  std::string text;
  for (const std::string& token : tokens) {
    if (&token != tokens.data()) text += separator_;
    text += token;
  }
  return text;
}

}  // namespace tessera::io
