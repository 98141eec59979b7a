#pragma once

#include <cstddef>
#include <string>

#include "tools/tessera/serve/executor.h"
#include "tools/tessera/serve/request.h"

namespace tessera::tools {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;            ///< 0: any that is free
  std::string api_key;        ///< empty: none needed
  std::size_t requests = 64;  ///< served or waiting at once; others are refused
};

/// OpenAI's HTTP endpoints. One instance at a time.
class ApiServer {
 public:
  /// Listens; connections wait until run(). @throws IoError if the address cannot be used
  explicit ApiServer(const ServerOptions& options);
  ~ApiServer();
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  int port() const;
  /// Serves until stop().
  void run(const ServedModel& model, Executor& executor);
  /// Whether run() has begun. Before it has, stop() has no effect.
  bool is_running() const;
  /// Refuses new connections and ends idle ones. Call it after the executor has stopped: requests
  /// have 2 s to send the end of their answers.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::tools
