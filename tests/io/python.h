#pragma once

#include <string>
#include <vector>

namespace tessera::test {

/// A Python interpreter in which `import_line` works, if this machine has one.
class Python {
 public:
  explicit Python(const std::string& import_line);

  explicit operator bool() const { return !program_.empty(); }
  /// Reason to skip a test that needs it.
  std::string missing() const;

  /// Runs a script, or a file with arguments, for at most a minute.
  /// @return standard output and standard error, then "exit code N"
  std::string run(const std::string& script) const;
  std::string run_file(const std::string& file, const std::vector<std::string>& arguments) const;

 private:
  std::string program_, import_line_;
};

}  // namespace tessera::test
