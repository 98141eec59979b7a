#include "tests/io/python.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <stdexcept>

#include "tests/io/support.h"
#include "tests/support/temp_dir.h"

namespace tessera::test {
namespace {

std::string quoted(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\'') result += "'\\'";
    result += c;
  }
  return fmt::format("'{}'", result);
}

std::string output_of(const std::string& command) {
  FILE* const pipe = ::popen(fmt::format("timeout 60 {} 2>&1", command).c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot run " + command);
  std::string text;
  std::array<char, 4096> buffer{};
  for (std::size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    text.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  return fmt::format("{}exit code {}\n", text, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

}  // namespace

Python::Python(const std::string& import_line) : import_line_(import_line) {
  for (const char* program : {"python3", "/usr/bin/python3"}) {
    if (output_of(fmt::format("{} -c {}", program, quoted(import_line)))
            .ends_with("exit code 0\n")) {
      program_ = program;
      return;
    }
  }
}

std::string Python::missing() const {
  return fmt::format("no python3 of this machine can run \"{}\"", import_line_);
}

std::string Python::run(const std::string& script) const {
  const TempDir dir;
  write_text(dir.path() / "script.py", script);
  return run_file(dir.path() / "script.py", {});
}

std::string Python::run_file(const std::string& file,
                             const std::vector<std::string>& arguments) const {
  std::string command = program_ + " -B " + quoted(file);
  for (const std::string& argument : arguments) command += fmt::format(" {}", quoted(argument));
  return output_of(command);
}

}  // namespace tessera::test
