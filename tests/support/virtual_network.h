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

/// Why a VirtualNetwork cannot be created, in one line.
struct NoVirtualNetwork : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Hosts on a private Ethernet within this machine: each has a network namespace, a host name, a
/// loopback and a TAP device; a test thread is the switch between them. Frames are lost or delayed
/// silently, as on a network. Nothing is left behind on the machine: namespaces and devices vanish
/// with their last descriptor and process.
class VirtualNetwork {
 public:
  /// Applied to each frame that a host sends or receives.
  struct Link {
    double loss = 0;                     ///< fraction of frames lost; 1: all
    std::chrono::milliseconds delay{0};  ///< of delivered frames
  };

  /// @throws NoVirtualNetwork without the right to create namespaces (root), or /dev/net/tun
  explicit VirtualNetwork(int hosts);
  ~VirtualNetwork();
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  /// IPv4 address of a host; hosts count from 0.
  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }
  static std::string name(int host) { return "host" + std::to_string(host); }
  /// Runs `body` on a thread inside the host's namespaces, which its processes and sockets inherit.
  /// Returns when `body` does; rethrows its exceptions.
  void on(int host, const std::function<void()>& body) const;
  /// Takes effect at once; thread-safe.
  void set_link(int host, Link link);
  void cut(int host) { set_link(host, {.loss = 1}); }
  void heal(int host) { set_link(host, {}); }
  /// Drops all IP packets between two hosts, as a firewall would; both still reach the others.
  void cut_between(int a, int b);

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    comm::FileDescriptor network, names;  // its namespaces
    comm::FileDescriptor tap;             // one frame per read or write
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
  std::mutex mutex_;  // guards links and apart_
  std::set<std::pair<int, int>> apart_;
  std::mt19937 random_{7};
  std::deque<Frame> under_way_;
  std::atomic<bool> stop_{false};
  std::thread switch_;
};

}  // namespace tessera::test
