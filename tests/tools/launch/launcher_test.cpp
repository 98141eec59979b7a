#include "tools/tessera/launch/launcher.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ostream>
#include <sstream>
#include <string>
#include <thread>

#include "comm/control/tcp_store.h"
#include "core/base/error.h"
#include "core/base/processors.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"
#include "tools/tessera/launch/rank_process.h"
#include "tools/tessera/launch/standard_error.h"

using namespace tessera;
using namespace std::chrono_literals;
using test::holds;
using tools::LaunchOptions;

namespace {

struct Run {
  int code = -1;
  std::string errors;
  std::chrono::milliseconds time{};
};

// Launches ranks that run a shell script with $RANK and $DIR, the test's directory. Collects the
// output of the launcher and of ranks other than 0.
Run run(int nproc, const std::string& script, const test::TempDir& dir,
        std::chrono::milliseconds notice = 100ms, std::chrono::milliseconds grace = 300ms,
        std::chrono::milliseconds leave = 30s, bool stop_together = true) {
  LaunchOptions options;
  options.stop_together = stop_together;
  options.program = "/bin/sh";
  options.notice = notice;
  options.grace = grace;
  options.leave = leave;
  const std::string log = dir.file("log");
  options.error_fd = ::open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  const auto start = std::chrono::steady_clock::now();
  Run result;
  result.code =
      tools::launch(nproc, {"sh", "-c", "DIR=" + dir.path().string() + "\n" + script}, options)
          .code;
  result.time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  ::close(options.error_fd);
  result.errors = dir.read("log");
  return result;
}

void wait_for_files(const test::TempDir& dir, int nproc) {
  for (int rank = 0; rank < nproc; ++rank) {
    for (int i = 0; i < 500 && !std::filesystem::exists(dir.file(std::to_string(rank))); ++i) {
      std::this_thread::sleep_for(10ms);
    }
  }
}

// @param text  a rank's "$TESSERA_RENDEZVOUS $TESSERA_RUN_ID $TESSERA_TOKEN"
comm::TcpStore store_of(const std::string& text) {
  const std::size_t colon = text.find(':'), blank = text.find(' '), last = text.rfind(' ');
  return comm::TcpStore(text.substr(0, colon),
                        static_cast<std::uint16_t>(std::stoi(text.substr(colon + 1))),
                        text.substr(blank + 1, last - blank - 1), 5s, 1,
                        text.substr(last + 1, text.find('\n') - last - 1));
}

}  // namespace

TEST_CASE("ranks get their variables, and success of all gives exit code 0") {
  const test::TempDir dir;
  const Run r = run(3,
                    "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $TESSERA_RENDEZVOUS "
                    "$TESSERA_RUN_ID $TESSERA_TOKEN > $DIR/$RANK",
                    dir);
  CHECK(r.code == 0);
  CHECK(r.errors == "");
  CHECK(dir.read("0").find("0 3 0 3 127.0.0.1:") == 0);
  CHECK(dir.read("2").find("2 3 2 3 127.0.0.1:") == 0);
  CHECK(dir.read("0").substr(8) == dir.read("1").substr(8));
}

TEST_CASE("the user's OMP_NUM_THREADS is kept, else cores are divided among ranks") {
  const test::TempDir dir;
  ::unsetenv("OMP_NUM_THREADS");
  run(1, "echo $OMP_NUM_THREADS > $DIR/unset", dir);
  CHECK(std::stoi(dir.read("unset")) == usable_processors());
  ::setenv("OMP_NUM_THREADS", "7", 1);
  run(2, "echo $OMP_NUM_THREADS > $DIR/$RANK", dir);
  ::unsetenv("OMP_NUM_THREADS");
  CHECK(dir.read("1") == "7\n");
}

TEST_CASE("ranks other than 0 print whole lines with their rank") {
  const test::TempDir dir;
  const Run r = run(2,
                    "test $RANK = 0 && exit 0\n"
                    "echo one; echo two >&2; printf 'no newline'",
                    dir);
  CHECK(r.code == 0);
  CHECK(r.errors == "[rank 1] one\n[rank 1] two\n[rank 1] no newline\n");
}

TEST_CASE("a rank killed by a signal is the root cause: exit code 4, and the others are ended") {
  const test::TempDir dir;
  const Run r = run(3, "test $RANK = 1 && kill -KILL $$\nexec sleep 30", dir);
  CHECK(r.code == 4);
  CHECK(holds(r.errors, "tessera: rank 1 (pid "));
  CHECK(holds(r.errors, ") was killed by SIGKILL; the other ranks were terminated\n"));
  CHECK(r.time < 3s);
}

TEST_CASE("a rank that waits for a killed one in an agreement learns of it at once") {
  const test::TempDir dir;
  std::string error;
  std::thread waiting([&] {  // acts as rank 0
    wait_for_files(dir, 1);
    comm::TcpStore store = store_of(dir.read("0"));
    dir.write("connected", "");
    try {
      comm::exchange(store, "vote", 0, 2, "yes", 60s);
    } catch (const CommError& e) {
      error = e.what();
    }
    dir.write("told", "");
  });
  const Run r = run(
      2,
      "if test $RANK = 0; then\n"
      "  echo $TESSERA_RENDEZVOUS $TESSERA_RUN_ID $TESSERA_TOKEN > $DIR/tmp; mv $DIR/tmp $DIR/0\n"
      "  while ! test -e $DIR/told; do sleep 0.05; done; exit 4\n"
      "fi\n"
      "while ! test -e $DIR/connected; do sleep 0.05; done; kill -KILL $$",
      dir, 30s);
  waiting.join();
  CHECK(r.code == 4);
  CHECK(r.time < 20s);
  CHECK(holds(error, "rank 1 (pid "));
  CHECK(holds(error, ") was killed by SIGKILL"));
  CHECK(r.errors.ends_with(") was killed by SIGKILL\n"));  // no other rank had to be ended
}

TEST_CASE("ranks that ignore SIGTERM are killed after the grace period") {
  const test::TempDir dir;
  const Run r =
      run(2, "trap '' TERM\ntest $RANK = 1 && exit 3\nwhile true; do sleep 0.05; done", dir);
  CHECK(r.code == 3);
  CHECK(r.time >= 400ms);
  CHECK(r.time < 10s);
}

TEST_CASE("a rank's own failure outranks communication errors that follow from it") {
  const test::TempDir dir;
  Run r = run(3, "test $RANK = 2 && exit 3\nsleep 0.05; exit 4", dir, 1000ms);
  CHECK(r.code == 3);
  CHECK(holds(r.errors, "rank 2 (pid "));
  CHECK(r.errors.ends_with("exited with code 3\n"));
  // Also when the others exit before the culprit.
  r = run(3, "test $RANK = 2 && { sleep 0.15; exit 2; }\nexit 4", dir, 1000ms);
  CHECK(r.code == 2);
  r = run(3, "test $RANK = 2 && { sleep 0.15; kill -SEGV $$; }\nexit 4", dir, 1000ms);
  CHECK(r.code == 4);
  CHECK(holds(r.errors, "rank 2 (pid "));
  CHECK(holds(r.errors, "SIGSEGV"));
  r = run(2, "exit 4", dir);
  CHECK(r.code == 4);
}

TEST_CASE("a failing single rank is named, without mention of others") {
  const test::TempDir dir;
  const Run r = run(1, "exit 3", dir);
  CHECK(r.code == 3);
  CHECK(r.errors.ends_with(") exited with code 3\n"));
}

TEST_CASE("exit codes are collected even if the parent ignores SIGCHLD") {
  const auto before = ::signal(SIGCHLD, SIG_IGN);
  const test::TempDir dir;
  const Run r = run(2, "test $RANK = 1 && exit 3\nsleep 0.05", dir);
  const auto after = ::signal(SIGCHLD, before);
  CHECK(r.code == 3);
  CHECK(r.time < 3s);
  CHECK((after == SIG_IGN));
}

TEST_CASE("a program that cannot be run is named") {
  const test::TempDir dir;
  LaunchOptions options;
  options.program = dir.file("no\x1bthing");
  options.error_fd = ::open(dir.file("log").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  CHECK(tools::launch(1, {"x"}, options).code == 127);
  ::close(options.error_fd);
  CHECK(holds(dir.read("log"), "(is " + dir.file("no\\x1bthing") + " an executable?)"));
  CHECK_THROWS_HOLDING(InvalidArgument, "--nproc: expected at least 1, got 0",
                       tools::launch(0, {"x"}, options));
}

TEST_CASE("SIGTERM is forwarded: 128 + 15 if all ranks stop, or are killed after a second one") {
  const struct {
    const char* on_term;
    int code;
    int requests = 1;
  } cases[] = {
      {"exit 143", 143}, {"exit 0", 0}, {"test $RANK = 1 && exit 3; exit 143", 3}, {"", 143, 2}};
  for (const auto& c : cases) {
    CAPTURE(c.on_term);
    const test::TempDir dir;
    const pid_t pid = ::fork();
    if (pid == 0) {
      const Run r = run(2,
                        std::string("trap '") + c.on_term +
                            "' TERM\ntouch $DIR/$RANK\nwhile true; do sleep 0.02; done",
                        dir);
      ::_exit(r.code);
    }
    wait_for_files(dir, 2);
    for (int i = 0; i < c.requests; ++i) {
      if (i > 0) std::this_thread::sleep_for(1100ms);  // earlier ones count as the same request
      ::kill(pid, SIGTERM);
    }
    int status = 0;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == c.code);
  }
}

TEST_CASE("a rank stopped before ranks can agree stops all, without a failure") {
  for (const std::string signal : {"TERM", "INT"}) {
    const test::TempDir dir;
    const Run r = run(3, "test $RANK = 1 && kill -" + signal + " $$\nexec sleep 30", dir);
    CHECK(r.code == (signal == "TERM" ? 143 : 130));
    CHECK(r.errors == "");
    CHECK(r.time < 10s);
  }
}

TEST_CASE("exit 143 is a failure of programs that do not agree to stop, and ends the others") {
  const test::TempDir dir;
  const Run r = run(2, "test $RANK = 1 && exit 143\nexec sleep 30", dir, 100ms, 300ms, 30s, false);
  CHECK(r.code == 143);
  CHECK(holds(r.errors, "exited with code 143; the other ranks were terminated"));
  CHECK(r.time < 10s);
}

TEST_CASE("the ranks die with the launcher") {
  const test::TempDir dir;
  const pid_t pid = ::fork();
  if (pid == 0) {
    run(2, "echo $$ > $DIR/pid.$RANK; touch $DIR/$RANK\nwhile true; do sleep 0.02; done", dir);
    ::_exit(0);
  }
  wait_for_files(dir, 2);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  for (const char* name : {"pid.0", "pid.1"}) {
    const pid_t rank = std::stoi(dir.read(name));
    bool gone = false;
    for (int i = 0; i < 200 && !gone; ++i) {
      // An unreaped zombie counts as gone.
      std::ifstream stat("/proc/" + std::to_string(rank) + "/stat");
      std::string id, program, state;
      gone = !(stat >> id >> program >> state) || state == "Z";
      if (!gone) std::this_thread::sleep_for(10ms);
    }
    CHECK(gone);
  }
}

TEST_CASE("only a rank that announces leaving but stays is killed and named") {
  for (const bool both : {false, true}) {
    CAPTURE(both);
    const test::TempDir dir;
    std::thread leaving([&] {  // acts as rank 1, and 0
      wait_for_files(dir, 1);
      comm::RankState state;
      state.leaving = true;
      auto store = store_of(dir.read("0"));
      store.beat(1, state);
      if (both) store.beat(0, state);
    });
    const Run r = run(2,
                      "echo $TESSERA_RENDEZVOUS $TESSERA_RUN_ID $TESSERA_TOKEN > $DIR/tmp$RANK\n"
                      "mv $DIR/tmp$RANK $DIR/$RANK\ntest $RANK = 1 && exec sleep 30\n"
                      "sleep 3; touch $DIR/done",
                      dir, 100ms, 300ms, 300ms);
    leaving.join();
    INFO(r.errors);
    CHECK(r.code == 4);
    CHECK(holds(r.errors, " did not exit within 0.3 s of announcing it, and w"));
    if (!both) {
      CHECK(holds(r.errors, "tessera: rank 1 (pid "));
      CHECK(r.errors.ends_with("of announcing it, and was killed\n"));
    }
    CHECK(r.time < 10s);
    // A rank that did not announce leaving continues.
    CHECK(std::filesystem::exists(dir.file("done")) == !both);
  }
}

namespace {

// Reads a pipe or socket to its end; join before using `log`.
std::thread reader_of(int fd, std::string& log) {
  return std::thread([fd, &log] {
    char bytes[4096];
    for (ssize_t n; (n = ::read(fd, bytes, sizeof(bytes))) > 0;)
      log.append(bytes, static_cast<std::size_t>(n));
  });
}

}  // namespace

TEST_CASE("an unread log drops old lines, whole, and says so") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  std::string log;
  std::thread reader;
  constexpr int kLines = 100'000;
  {
    tools::LogOutput output(ends[1]);
    tools::LogBuffer buffer(output);
    std::ostream stream(&buffer);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kLines; ++i) stream << fmt::format("line {}\n", i);
    CHECK(std::chrono::steady_clock::now() - start < 20s);
    CHECK(output.fd() >= 0);
    CHECK_FALSE(output.wait(50ms, 50ms));
    reader = reader_of(ends[0], log);
    CHECK(output.wait(10s, 20s));
  }
  ::close(ends[1]);
  reader.join();
  ::close(ends[0]);
  CHECK(log.size() > 128 * 1024);
  // The first lines, the warning, the last lines.
  std::istringstream lines(log);
  int next = 0, warnings = 0;
  std::size_t dropped = 0, noted = 0;
  for (std::string line; std::getline(lines, line);) {
    constexpr std::string_view kWarning = "tessera: warning: ";
    if (line.starts_with(kWarning)) {
      ++warnings;
      noted = std::stoul(line.substr(kWarning.size()));
      continue;
    }
    REQUIRE(line.starts_with("line "));
    for (const int number = std::stoi(line.substr(5)); next < number; ++next)
      dropped += fmt::format("line {}\n", next).size();
    REQUIRE(line == fmt::format("line {}", next++));
  }
  CHECK(next == kLines);
  CHECK(warnings == 1);
  CHECK(noted == dropped);
}

TEST_CASE("ranks that are killed together are all named") {
  const test::TempDir dir;
  const Run r = run(3, "test $RANK = 0 || kill -KILL $$; sleep 5", dir, 2s);
  INFO(r.errors);
  CHECK(r.code == 4);
  for (const char* part : {"rank 1 (pid ", "rank 2 (pid ", " was killed by SIGKILL; rank ",
                           ") was killed by SIGKILL; the other ranks were terminated\n"})
    CHECK(holds(r.errors, part));
}

TEST_CASE("ranks are ended, and lines stay whole, while the log is unread") {
  for (const bool is_socket : {false, true}) {
    CAPTURE(is_socket);
    const test::TempDir dir;
    int ends[2];
    REQUIRE((is_socket ? ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)
                       : ::pipe2(ends, O_CLOEXEC)) == 0);
    std::string log;
    bool has_ended = false;
    std::thread reader([&] {
      for (int i = 0; i < 2000 && !has_ended; ++i) {
        std::this_thread::sleep_for(10ms);
        has_ended = std::filesystem::exists(dir.file("ended"));
      }
      reader_of(ends[0], log).join();
    });
    LaunchOptions options;
    options.program = "/bin/sh";
    options.notice = 100ms;
    options.grace = 5000ms;
    options.error_fd = ends[1];
    const int code =
        tools::launch(3,
                      {"sh", "-c",
                       "DIR=" + dir.path().string() +
                           "\ntest $RANK = 0 && { trap 'touch $DIR/ended; exit 1' TERM\n"
                           "  while true; do sleep 0.05; done; }\n"
                           "test $RANK = 1 && { sleep 1; kill -KILL $$; }\n"
                           "while true; do echo a line of many; done"},
                      options)
            .code;
    ::close(ends[1]);
    reader.join();
    ::close(ends[0]);
    CHECK(code == 4);
    CHECK(has_ended);
    const std::string line = "[rank 2] a line of many\n";
    std::size_t at = 0;
    while (log.compare(at, line.size(), line) == 0) at += line.size();
    CHECK(at > 100'000);
    // The last line may be incomplete.
    const std::string rest = log.substr(at, 300);
    CAPTURE(rest);
    CHECK(holds(rest, "tessera: rank 1 (pid "));
    CHECK(log.ends_with(") was killed by SIGKILL; the other ranks were terminated\n"));
    CHECK(log.size() - at < 300);
  }
}

TEST_CASE("a rank that writes without end does not block the copying of its lines") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  REQUIRE(::fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) >= 1 << 20);
  const std::string line(99, 'x');
  std::size_t written = 0;
  for (; written < 500'000; written += 100)
    REQUIRE(::write(ends[1], (line + "\n").data(), 100) == 100);
  const test::TempDir dir;
  const std::string path = dir.file("log");
  const int log = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  tools::LogOutput output(log);
  tools::LinePrefixer prefixer{comm::FileDescriptor(ends[0]), output, ""};
  prefixer.pump();
  CHECK(::lseek(log, 0, SEEK_END) <= 64 * 1024);
  CHECK(::lseek(log, 0, SEEK_END) > 32 * 1024);
  ::close(ends[1]);
  for (int i = 0; i < 20 && prefixer.fd() >= 0; ++i) prefixer.pump();
  CHECK(prefixer.fd() == -1);
  CHECK(::lseek(log, 0, SEEK_END) == static_cast<off_t>(written));
  ::close(log);
}
