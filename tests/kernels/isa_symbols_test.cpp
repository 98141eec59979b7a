// Code compiled for one CPU level must not be linkable from another: the linker keeps one copy of a
// shared inline function, and an AVX-512 copy crashes on every other processor.
#include <doctest/doctest.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace {

/// Demangled external symbols that the object files define.
std::vector<std::string> exported_symbols(const std::string& objects) {
  const std::string command = "nm -C --defined-only --extern-only " + objects;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  REQUIRE(pipe != nullptr);
  std::vector<std::string> lines;
  std::array<char, 4096> buffer;
  std::string line;
  while (std::fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr) {
    line += buffer.data();
    if (line.empty() || line.back() != '\n') continue;
    line.pop_back();
    // Format: address, type, name
    if (line.size() > 19 && line[16] == ' ' && line[18] == ' ') lines.push_back(line.substr(19));
    line.clear();
  }
  return lines;
}

[[maybe_unused]] void check_level(const std::string& level, const std::string& objects) {
  CAPTURE(level);
  const std::string own = "tessera::kernels::cpu::" + level + "::";
  bool found_kernel = false;
  std::string foreign;
  for (const std::string& name : exported_symbols(objects)) {
    if (name.rfind(own + "matmul(", 0) == 0) found_kernel = true;
    // A pointer that g++ emits for exception tables, not code.
    if (name == "DW.ref.__gxx_personality_v0") continue;
    const bool renamed_eigen = name.find("Eigen_" + level + "::") != std::string::npos;
    if (name.find(own) == std::string::npos && !renamed_eigen) foreign += name + "\n";
  }
  CHECK(found_kernel);
  CHECK(foreign == "");
}

}  // namespace

TEST_CASE("object files of a CPU level export nothing outside of their namespace") {
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(TESSERA_OBJECTS_generic)
  check_level("generic", TESSERA_OBJECTS_generic);
#else
  check_level("v3", TESSERA_OBJECTS_v3);
  check_level("v4", TESSERA_OBJECTS_v4);
#endif
#else
  MESSAGE("skipped: without optimization, or with sanitizers, inline functions of the base stay");
#endif
}
