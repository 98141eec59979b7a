// Writes logits of a model for comparison with other programs (tools/check_transformers.py).
//
//   tessera_logits MODEL < rows > logits
//
// Each line of standard input is a row of T token ids, for which [T, vocab_size] f32 in native byte
// order are written, computed on the CPU.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "tools/tessera/model/loaded_model.h"

namespace tessera::tools {
namespace {

void write_logits(const LoadedModel& loaded, const std::string& line) {
  std::istringstream words(line);
  std::vector<std::int32_t> ids;
  for (std::int32_t id = 0; words >> id;) ids.push_back(id);
  require(words.eof() && !ids.empty(), "expected a row of token ids, found \"{}\"", line);
  const Shape shape{1, static_cast<std::int64_t>(ids.size())};
  const Tensor logits =
      loaded.model->logits(Tensor::from<std::int32_t>(loaded.context, shape, std::span(ids)));
  const std::vector<float> values = logits.to_vector<float>();
  require<IoError>(
      std::fwrite(values.data(), sizeof(float), values.size(), stdout) == values.size(),
      "cannot write {} logits to standard output", values.size());
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  try {
    tessera::require(argc == 2, "usage: tessera_logits MODEL < rows > logits");
    tessera::tools::LoadOptions options;
    options.device = "cpu";
    const auto loaded = tessera::tools::load_model(argv[1], options);
    for (std::string line; std::getline(std::cin, line);) {
      tessera::tools::write_logits(loaded, line);
    }
    tessera::require<tessera::IoError>(std::fflush(stdout) == 0, "cannot write to standard output");
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_logits: {}\n", error.what());
    return 1;
  }
}
