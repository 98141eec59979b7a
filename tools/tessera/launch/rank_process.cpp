#include "tools/tessera/launch/rank_process.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/error.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMaxLine = 64 * 1024;  // longer lines are split
constexpr int kReads = 16;                   // per pump(), for 64 KiB in total

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

void LinePrefixer::pump() {
  char bytes[4096];
  for (int i = 0; i < kReads && from_; ++i) {
    const ssize_t n = ::read(from_.get(), bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      finish();
      from_ = comm::FileDescriptor();
      return;
    }
    partial_.append(bytes, static_cast<std::size_t>(n));
    std::size_t begin = 0;
    for (std::size_t end; (end = partial_.find('\n', begin)) != partial_.npos; begin = end + 1) {
      write_line(std::string_view(partial_).substr(begin, end - begin));
    }
    partial_.erase(0, begin);
    if (partial_.size() > kMaxLine) finish();
  }
}

void LinePrefixer::finish() {
  if (!partial_.empty()) write_line(partial_);
  partial_.clear();
}

RankProcess::RankProcess(int rank, RankCommand command, LogOutput& log) {
  const auto argv = pointers(command.arguments), envp = pointers(command.environment);
  int ends[2] = {-1, -1};
  require<IoError>(rank == 0 || ::pipe2(ends, O_CLOEXEC) == 0, "pipe failed: {}",
                   std::strerror(errno));
  comm::FileDescriptor from(ends[0]), to(ends[1]);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  require<IoError>(pid_ >= 0, "cannot start rank {}: fork failed: {}", rank, std::strerror(errno));
  if (pid_ == 0) {  // the child must not allocate, because the parent has threads
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(kCommunication);  // the parent died before prctl()
    if (rank != 0) {
      ::dup2(to.get(), STDOUT_FILENO);
      ::dup2(to.get(), STDERR_FILENO);
    }
    // A signal before exec must not run a handler of this program.
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
      struct sigaction action {};
      ::sigaction(number, nullptr, &action);
      if (action.sa_handler != SIG_IGN) ::signal(number, SIG_DFL);
    }
    ::pthread_sigmask(SIG_SETMASK, &command.mask, nullptr);
    ::execve(command.program.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  if (rank == 0) return;
  ::fcntl(from.get(), F_SETFL, O_NONBLOCK);
  output_.emplace(std::move(from), log, fmt::format("[rank {}] ", rank));
}

void RankProcess::signal(int number) const {
  if (running_) ::kill(pid_, number);
}

void RankProcess::kill_expected() {
  is_expected_to_end_ = true;
  signal(SIGKILL);
}

std::optional<int> RankProcess::reap() {
  int status = 0;
  if (!running_) return std::nullopt;
  const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
  if (ended == 0 || (ended < 0 && errno != ECHILD)) return std::nullopt;
  running_ = false;
  return ended > 0 ? status : W_EXITCODE(1, 0);  // counts as a failure without a status
}

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::string describe_end(int status) {
  return WIFSIGNALED(status) ? "was killed by " + signal_name(WTERMSIG(status))
                             : fmt::format("exited with code {}", WEXITSTATUS(status));
}

std::string short_end(int status) {
  return WIFSIGNALED(status) ? signal_name(WTERMSIG(status))
                             : fmt::format("exit code {}", WEXITSTATUS(status));
}

}  // namespace tessera::tools
