#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fault_log.h"
#include "tests/support/machine_time.h"

namespace tessera::test {

/// Factor on time limits, for the slower thread sanitizer.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlack = 4;
#else
inline constexpr int kSlack = 1;
#endif

struct Outcome {
  bool in_time = false;              ///< ended before the deadline; false: killed
  int exit_code = -1;                ///< -1 if a signal ended it
  int signal = 0;                    ///< signal that ended it, or 0
  std::string text;                  ///< result of its body, or "error: " and the exception's text
  std::chrono::milliseconds time{};  ///< from go() to its end
};

/// Ranks as forked children; the test must have no other threads yet. Each waits for go(), so that
/// servers with threads can start after the fork.
class Processes {
 public:
  using Body = std::function<std::string(int rank, const std::string& from_test)>;

  Processes(int world_size, const Body& body) {
    log_fault("{\"world\": " + std::to_string(world_size) + ", \"share\": 1}");
    for (int rank = 0; rank < world_size; ++rank) {
      int go[2], text[2];
      if (::pipe2(go, O_CLOEXEC) != 0 || ::pipe2(text, O_CLOEXEC) != 0) {
        throw std::runtime_error("pipe failed");
      }
      const pid_t pid = ::fork();
      if (pid < 0) throw std::runtime_error("fork failed");
      if (pid == 0) {
        for (const Child& other : children_) ::close(other.go);
        ::close(go[1]);
        run_child(rank, body, go[0], text[1]);
      }
      ::close(go[0]);
      ::close(text[1]);
      children_.push_back({pid, go[1], text[0], false, {}});
    }
  }
  ~Processes() {
    for (const Child& child : children_) {
      if (!child.reaped) {
        ::kill(child.pid, SIGKILL);
        ::waitpid(child.pid, nullptr, 0);
      }
      if (child.go >= 0) ::close(child.go);
      ::close(child.text);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  /// Starts all bodies, passing them `text`.
  void go(const std::string& text) {
    start_ = std::chrono::steady_clock::now();
    for (Child& child : children_) {
      if (::write(child.go, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
        throw std::runtime_error("a child ended early");
      }
      ::close(std::exchange(child.go, -1));
    }
  }
  void signal(int rank, int number) { ::kill(pid(rank), number); }
  pid_t pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }

  /// Waits for all children up to the deadline, extended by stolen time, then kills the rest.
  /// @param stopped  a stopped rank: not waited for once all others have ended
  std::vector<Outcome> wait(std::chrono::milliseconds deadline, int stopped = -1) {
    const auto end = std::chrono::steady_clock::now() + deadline;
    const auto stolen = StolenTime::now();
    bool left = true;
    while (left) {
      const auto now = std::chrono::steady_clock::now();
      const bool alone =
          stopped >= 0 && std::all_of(children_.begin(), children_.end(), [&](const Child& child) {
            return child.reaped || child.pid == pid(stopped);
          });
      const bool late = alone || (now >= end && now >= end + StolenTime::now().since(stolen));
      left = false;
      for (Child& child : children_) {
        if (child.reaped) continue;
        if (late) ::kill(child.pid, SIGKILL);
        int status = 0;
        if (::waitpid(child.pid, &status, late ? 0 : WNOHANG) != child.pid) {
          left = true;
          continue;
        }
        child.reaped = true;
        child.outcome.in_time = !late;
        if (WIFEXITED(status)) child.outcome.exit_code = WEXITSTATUS(status);
        if (WIFSIGNALED(status)) child.outcome.signal = WTERMSIG(status);
        child.outcome.time = std::chrono::duration_cast<std::chrono::milliseconds>(
            std::chrono::steady_clock::now() - start_);
        child.outcome.text = read_all(child.text);
      }
      if (left) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::vector<Outcome> outcomes;
    for (const Child& child : children_) outcomes.push_back(child.outcome);
    return outcomes;
  }

 private:
  struct Child {
    pid_t pid;
    int go, text;
    bool reaped;
    Outcome outcome;
  };

  static std::string read_all(int fd) {
    std::string text;
    char bytes[4096];
    for (ssize_t n; (n = ::read(fd, bytes, sizeof(bytes))) > 0;) {
      text.append(bytes, static_cast<std::size_t>(n));
    }
    return text;
  }

  [[noreturn]] static void run_child(int rank, const Body& body, int go, int out) {
    std::string text;
    int code = 0;
    try {
      text = body(rank, read_all(go));
    } catch (const std::exception& error) {
      text = std::string("error: ") + error.what();
      code = 1;
    }
    // A pipe's buffer takes this much without a reader.
    [[maybe_unused]] const auto n =
        ::write(out, text.data(), std::min<std::size_t>(text.size(), 4096));
    ::_exit(code);
  }

  std::vector<Child> children_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tessera::test
