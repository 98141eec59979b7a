// The program does not link CUDA libraries, so that it runs without them; its plugins do.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace {

std::string output_of(const std::string& tool) {
  const tessera::test::TempDir dir;
  const std::string command = tool + " '" + tessera::test::tessera_program() + "' >" +
                              dir.file("out") + " 2>" + dir.file("err") + " </dev/null";
  return std::system(command.c_str()) == 0 ? dir.read("out") : "";
}

/// DT_NEEDED lines in lower case, as readelf and objdump print them.
std::vector<std::string> needed(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.find("NEEDED") == std::string::npos) continue;
    std::transform(line.begin(), line.end(), line.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    lines.push_back(line);
  }
  return lines;
}

bool is_of_cuda(const std::string& line) {
  const char* const names[] = {"cuda", "cublas", "cudnn", "nccl", "nvrtc"};
  return std::any_of(std::begin(names), std::end(names),
                     [&](const char* name) { return line.find(name) != std::string::npos; });
}

}  // namespace

TEST_CASE("the program needs no CUDA library") {
  std::string text = output_of("readelf -d");
  if (text.empty()) text = output_of("objdump -p");
  if (text.empty()) {
    MESSAGE("skipped: neither readelf nor objdump can be run");
    return;
  }
  const auto libraries = needed(text);
  CHECK(std::any_of(libraries.begin(), libraries.end(), [](const std::string& line) {
    return line.find("libstdc++") != std::string::npos || line.find("libc++") != std::string::npos;
  }));
  for (const std::string& line : libraries) {
    CAPTURE(line);
    CHECK_FALSE(is_of_cuda(line));
  }
}
