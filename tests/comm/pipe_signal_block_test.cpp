#include "comm/pipe_signal_block.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "comm/control/socket.h"

using namespace tessera;

namespace {

// @return whether that would have been a SIGPIPE
bool write_to_nobody() {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const comm::FileDescriptor to(ends[1]);
  ::close(ends[0]);
  return ::write(to.get(), "x", 1) == -1 && errno == EPIPE;
}

bool is_blocked() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, SIGPIPE) == 1;
}

}  // namespace

TEST_CASE("a write to nobody is an error in its scope, and no signal after it") {
  std::signal(SIGPIPE, SIG_DFL);
  std::thread([] {
    {
      const comm::PipeSignalBlock block;
      CHECK(is_blocked());
      CHECK(write_to_nobody());
      {
        const comm::PipeSignalBlock inner;
        CHECK(write_to_nobody());
      }
      CHECK(is_blocked());
    }
    CHECK(!is_blocked());  // and this thread lives
  }).join();
}
