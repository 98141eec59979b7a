#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/paths.h"

namespace {

namespace fs = std::filesystem;

/// A folder and the folders that it may include, transitively.
struct Layer {
  std::string_view folder;
  std::vector<std::string_view> may_include;
};

const std::vector<Layer>& layers() {
  static const std::vector<Layer> kLayers = {
      {"core/base", {}},
      {"kernels", {"core/base"}},
      {"core", {"kernels"}},
      {"models", {"core", "io"}},
      {"comm", {"core/base"}},
      {"comm/sharding", {"core", "comm"}},
      {"io", {"core"}},
      {"capi", {"io"}},
      {"train", {"comm/sharding", "io"}},
      {"tools", {"models", "train"}},
  };
  return kLayers;
}

bool is_inside(std::string_view path, std::string_view folder) {
  return path.size() > folder.size() && path.substr(0, folder.size()) == folder &&
         path[folder.size()] == '/';
}

const Layer* layer_of(std::string_view path) {
  const Layer* found = nullptr;
  for (const Layer& layer : layers()) {
    if (is_inside(path, layer.folder) &&
        (found == nullptr || layer.folder.size() > found->folder.size()))
      found = &layer;
  }
  return found;
}

bool reaches(const Layer& from, const Layer& to) {
  if (&from == &to) return true;
  return std::any_of(from.may_include.begin(), from.may_include.end(), [&](std::string_view name) {
    const auto next = std::find_if(layers().begin(), layers().end(),
                                   [&](const Layer& layer) { return layer.folder == name; });
    return reaches(*next, to);
  });
}

/// The path in an #include line; empty if there is none, or if angle brackets enclose a foreign
/// path.
std::string_view included(std::string_view line) {
  const auto skip_spaces = [&] {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  skip_spaces();
  if (line.empty() || line.front() != '#') return {};
  line.remove_prefix(1);
  skip_spaces();
  constexpr std::string_view kInclude = "include";
  if (line.substr(0, kInclude.size()) != kInclude) return {};
  line.remove_prefix(kInclude.size());
  skip_spaces();
  if (line.empty() || (line.front() != '"' && line.front() != '<')) return {};
  const bool quoted = line.front() == '"';
  line.remove_prefix(1);
  const std::string_view path = line.substr(0, line.find(quoted ? '"' : '>'));
  return quoted || layer_of(path) != nullptr ? path : std::string_view();
}

/// Says why `file` may not include `path`; empty if it may. Paths are relative to the source root.
std::string objection(std::string_view file, std::string_view path) {
  const Layer* from = layer_of(file);
  const Layer* to = layer_of(path);
  if (to == nullptr)
    return "includes are written from the root of the sources, in one of its layers";
  if (!reaches(*from, *to)) return fmt::format("{} may not include {}", from->folder, to->folder);
  for (const std::string_view backend : {"kernels/cpu", "kernels/cuda"}) {
    if (!is_inside(path, backend) || is_inside(file, backend)) continue;
    if (from->folder != "kernels")
      return fmt::format("{} is private to kernels: include kernels/<family>.h", backend);
    if (file.substr(file.size() - 2) == ".h")
      return fmt::format("headers of kernels are the same for all devices and leave out {}",
                         backend);
  }
  return {};
}

TEST_CASE("every include follows the layering") {
  const fs::path root = tessera::test::source_path();
  std::vector<std::string> offenders;
  int files = 0, includes = 0;
  for (const std::string_view top : {"core", "kernels", "models", "comm", "io", "capi", "tools"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cpp" && extension != ".cu" && extension != ".cuh")
        continue;
      const std::string file = fs::relative(entry.path(), root).generic_string();
      if (is_inside(file, "tools/examples")) continue;  // users of the installed package
      std::ifstream source(entry.path());
      REQUIRE(source.good());
      ++files;
      std::string line;
      for (int number = 1; std::getline(source, line); ++number) {
        const std::string_view path = included(line);
        if (path.empty()) continue;
        ++includes;
        const std::string reason = objection(file, path);
        if (!reason.empty())
          offenders.push_back(fmt::format("{}:{}: includes {}: {}", file, number, path, reason));
        else if (!fs::exists(root / path))
          offenders.push_back(fmt::format("{}:{}: {} does not exist", file, number, path));
      }
    }
  }
  for (const std::string& offender : offenders) MESSAGE(offender);
  CHECK(offenders.empty());
  CHECK(files > 50);
  CHECK(includes > files);
}

TEST_CASE("the layering is the designed one") {
  const auto allowed = [](std::string_view file, std::string_view path) {
    return objection(file, path).empty();
  };
  CHECK(allowed("models/decoder.cpp", "core/base/error.h"));
  CHECK(allowed("core/ops/norm.cpp", "kernels/norm.h"));
  CHECK(allowed("comm/sharding/unit.cpp", "core/tensor.h"));
  CHECK(allowed("comm/sharding/unit.cpp", "comm/communicator.h"));
  CHECK(allowed("io/hf/import.cpp", "core/tensor.h"));
  CHECK(allowed("tools/tessera/main.cpp", "comm/sharding/unit.h"));
  CHECK(allowed("kernels/norm.cpp", "kernels/cpu/norm.h"));
  CHECK(allowed("kernels/cpu/norm.h", "kernels/cpu/level.h"));

  CHECK_FALSE(allowed("core/base/storage.cpp", "core/tensor.h"));
  CHECK_FALSE(allowed("core/base/storage.cpp", "kernels/norm.h"));
  CHECK_FALSE(allowed("kernels/norm.cpp", "core/ops/norm.h"));
  CHECK_FALSE(allowed("core/tensor.h", "models/decoder.h"));
  CHECK_FALSE(allowed("models/decoder.cpp", "comm/communicator.h"));
  CHECK_FALSE(allowed("comm/tcp.cpp", "core/tensor.h"));
  CHECK_FALSE(allowed("comm/tcp.cpp", "comm/sharding/unit.h"));
  CHECK_FALSE(allowed("io/checkpoint/writer.cpp", "comm/communicator.h"));
  CHECK_FALSE(allowed("io/hf/import.cpp", "models/decoder.h"));
  CHECK_FALSE(allowed("comm/tcp.cpp", "tools/tessera/command.h"));
  CHECK_FALSE(allowed("kernels/norm.h", "kernels/cpu/norm.h"));
  CHECK_FALSE(allowed("core/ops/norm.cpp", "kernels/cpu/norm.h"));
  CHECK_FALSE(allowed("tools/bench/norm.cpp", "kernels/cuda/norm.h"));
  CHECK_FALSE(allowed("core/ops/norm.cpp", "norm.h"));
}

TEST_CASE("every form of #include is found") {
  CHECK(included("#include \"core/tensor.h\"") == "core/tensor.h");
  CHECK(included("  #  include   \"core/tensor.h\"  // why") == "core/tensor.h");
  CHECK(included("#include <core/tensor.h>") == "core/tensor.h");
  CHECK(included("#include \"tensor.h\"") == "tensor.h");
  CHECK(included("#include <vector>").empty());
  CHECK(included("// #include \"core/tensor.h\"").empty());
  CHECK(included("#define X \"core/tensor.h\"").empty());
  CHECK(included("").empty());
}

}  // namespace
