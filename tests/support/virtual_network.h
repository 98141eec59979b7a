#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/socket.h"

namespace tessera::test {

/// Why this process cannot make a VirtualNetwork; what() is one line.
struct NoVirtualNetwork : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A few hosts on an Ethernet of their own, all on this machine: each has a network namespace, a
/// host name, a loopback device and a TAP device, and a thread of the test is the switch between
/// them. So it can lose or delay what it likes, as a network does: nobody is told. Nothing of it
/// has a name on the machine; namespaces and devices go with their last descriptor and process.
class VirtualNetwork {
 public:
  /// What becomes of each frame that leaves a host or comes to it.
  struct Link {
    double loss = 0;                     ///< the part of them that is lost; 1: all
    std::chrono::milliseconds delay{0};  ///< of the others
  };

  /// @throws NoVirtualNetwork without the right to make namespaces (root's), or /dev/net/tun
  explicit VirtualNetwork(int hosts);
  ~VirtualNetwork();
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  /// The IPv4 address of a host, from 0.
  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }
  /// Its name.
  static std::string name(int host) { return "host" + std::to_string(host); }
  /// Runs `body` on a thread that is on that host, and so are the processes and sockets that it
  /// makes. Returns when it has ended; throws what it throws.
  void on(int host, const std::function<void()>& body) const;
  /// From now on; any thread.
  void set_link(int host, Link link);
  void cut(int host) { set_link(host, {.loss = 1}); }
  void heal(int host) { set_link(host, {}); }
  /// No IP packet passes between these two any more, as if a firewall dropped them; both still
  /// reach all others.
  void cut_between(int a, int b);

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    comm::FileDescriptor network, names;  // its namespaces
    comm::FileDescriptor tap;             // a frame a read, and a write
    Link link = {};
  };
  struct Frame {
    Clock::time_point due;
    std::size_t to;
    std::string bytes;
  };

  static void make_host(int number, Host& host);
  void serve();
  void pass_on(std::size_t from, const std::string& frame);
  void deliver(Clock::time_point now);

  std::vector<Host> hosts_;
  std::mutex mutex_;  // of the links, and of:
  std::set<std::pair<int, int>> apart_;
  std::mt19937 random_{7};
  std::deque<Frame> under_way_;
  std::atomic<bool> stop_{false};
  std::thread switch_;
};

}  // namespace tessera::test
