// Runs all seeds, with truncated and mutated copies of each, through their fuzz targets, without
// libFuzzer.
//   fuzz_replay SEEDS [TARGET...]
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include "tests/fuzz/fuzz.h"

namespace {

using tessera::fuzz::Target;

constexpr std::size_t kVariants = 16;  // per seed

void run(const Target& target, const std::string& text) {
  // Exact size, so that a sanitizer detects reads past the end.
  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  target.run(bytes.data(), bytes.size());
}

int replay(const Target& target, const std::filesystem::path& folder) {
  int seeds = 0;
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    const std::string text = tessera::io::read_file(item.path(), 1 << 24);
    std::fprintf(stderr, "%s: %s\n", target.name, item.path().filename().c_str());
    run(target, text);
    for (std::size_t i = 0; i < std::min(kVariants, text.size()); ++i) {
      const std::size_t at = i * text.size() / kVariants;
      run(target, text.substr(0, at));
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ (1 << i % 8));
      run(target, changed);
    }
    ++seeds;
  }
  return seeds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  int failed = 0;
  for (const Target& target : tessera::fuzz::targets()) {
    if (argc > 2 && std::find(argv + 2, argv + argc, std::string(target.name)) == argv + argc)
      continue;
    try {
      if (replay(target, std::filesystem::path(argv[1]) / target.seeds) > 0) continue;
      std::fprintf(stderr, "%s has no seeds in %s\n", target.name, argv[1]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", target.name, error.what());
    }
    failed = 1;
  }
  return failed;
}
