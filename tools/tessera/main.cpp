// Maps errors to messages and exit codes.

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/base/error.h"
#include "tools/tessera/command.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/launch/standard_error.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

// @param json  whether to print the error on standard output, too
int report(int code, std::string_view message, bool json = false) {
  if (json)
    std::fputs((nlohmann::json{{"error", message}, {"exit_code", code}}.dump(
                    2, ' ', false, nlohmann::json::error_handler_t::replace) +
                "\n")
                   .c_str(),
               stdout);
  say_at_last(fmt::format("tessera: error: {}\n", escaped_lines(message)));
  return code;
}

int report_bug(std::string_view message, bool json = false) {
  return report(kFailed,
                fmt::format("{}\ntessera: this is a bug in tessera; please report it with the "
                            "command that you ran and the output above",
                            message),
                json);
}

int run(const std::vector<Command>& commands, bool json) {
  try {
    return run_parsed(commands);
  } catch (const CLI::Error& error) {
    return report(kUsage, error.what(), json);
  } catch (const InvalidArgument& error) {
    return report(kUsage, error.what(), json);
  } catch (const Unsupported& error) {
    return report(kUsage, error.what(), json);
  } catch (const IoError& error) {
    return report(kIo, error.what(), json);
  } catch (const CorruptCheckpoint& error) {
    return report(kIo, error.what(), json);
  } catch (const std::system_error& error) {
    // fmt::print throws this if the reader of the output, such as head, has exited.
    if (error.code() == std::errc::broken_pipe) return kIo;
    return report(kIo, error.what(), json);
  } catch (const CommError& error) {
    return report(kCommunication, error.what(), json);
  } catch (const OutOfMemory& error) {
    return report(kMemory, error.what(), json);
  } catch (const std::bad_alloc&) {
    return report(kMemory, "out of host memory", json);
  } catch (const InternalError& error) {
    return report_bug(error.what(), json);
  } catch (const Error& error) {
    return report(kFailed, error.what(), json);
  } catch (const std::exception& error) {
    return report_bug(error.what(), json);
  }
}

/// Flushes standard output and reports errors, but not if its reader, such as head, has exited.
int flush_output(int code) {
  errno = 0;
  const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (!lost || code > kFailed) return code;
  const int why = errno;
  pollfd output{STDOUT_FILENO, POLLOUT, 0};
  if (::poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0) return code;
  return report(kIo, fmt::format("cannot write standard output{}{}; the output is incomplete",
                                 why == 0 ? "" : ": ", why == 0 ? "" : std::strerror(why)));
}

/// Suggests the nearest command; CLI11 would only list the leftover words.
int refuse_command(std::string_view word, const std::vector<Command>& commands) {
  const auto nearest = std::ranges::min_element(commands, {}, [&](const Command& command) {
    return edit_distance(word, command.app->get_name());
  });
  return report(kUsage,
                fmt::format("unknown command \"{}\"; did you mean \"{}\"? See tessera --help", word,
                            nearest->app->get_name()));
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{
      "Trains GPT models with parameters, gradients and optimizer state sharded over ranks",
      "tessera"};
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.require_subcommand(1);
  const std::vector<Command> commands = {
      add_train(app), add_generate(app),   add_eval(app), add_consolidate(app), add_checkpoint(app),
      add_plan(app),  add_models(app),     add_data(app), add_doctor(app),      add_run(app),
      add_plot(app),  add_run_report(app), add_serve(app)};
  if (argc < 2) {
    say_at_last(app.help());
    return kUsage;
  }
  const std::string_view first = argv[1];
  const bool known = std::ranges::any_of(
      commands, [&](const Command& command) { return command.app->check_name(argv[1]); });
  if (!first.starts_with('-') && !known) return refuse_command(first, commands);
  // The ranks of `train` write to one standard output, so their errors go to standard error alone.
  const bool json = first != "train" && first != "run" &&
                    std::find(argv, argv + argc, std::string_view("--json")) != argv + argc;
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {  // --help, --version
    std::ostringstream text;
    const int code = app.exit(help, text);
    std::fputs(text.str().c_str(), stdout);
    return flush_output(code);
  } catch (const CLI::ParseError& error) {
    report(kUsage, error.what(), json);
    say_at_last(fmt::format("See tessera {}--help\n",
                            first.starts_with('-') ? "" : fmt::format("{} ", first)));
    return flush_output(kUsage);
  }
  return flush_output(run(commands, json));
}

/// Opens closed standard streams, because otherwise the next opened files would get their
/// descriptors and receive our messages.
void open_standard_streams() {
  int fd = -1;
  do fd = ::open("/dev/null", O_RDWR);  // takes the lowest free descriptor
  while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO) ::close(fd);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  tessera::tools::open_standard_streams();
  // Let writes fail instead of raising signals, so that a run outlives the reader of its output and
  // reports a file-size limit like a full disk. Ranks inherit both settings.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  // An exception that leaves main would lose its message.
  try {
    return tessera::tools::parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    return tessera::tools::report_bug(error.what());
  }
}
