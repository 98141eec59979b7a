#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <thread>

#include "tools/tessera/model/loaded_model.h"
#ifdef TESSERA_HTTPLIB
#include "tools/tessera/serve/server.h"
#include "tools/tessera/signal/stop_signal.h"
#endif

namespace tessera::tools {
namespace {

struct ServeOptions {
  std::string model, name, chat_template;
  std::string host = "127.0.0.1", api_key;
  int port = 8000;
  std::int64_t requests = 64, batch = 8;
  LoadOptions load;
};

#ifdef TESSERA_HTTPLIB

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  if (::inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

int run(const ServeOptions& options) {
  ServerOptions http{.host = options.host,
                     .port = options.port,
                     .api_key = options.api_key,
                     .requests = static_cast<std::size_t>(options.requests)};
  const char* const from_environment =
      std::getenv("TESSERA_API_KEY");  // NOLINT(concurrency-mt-unsafe)
  if (http.api_key.empty() && from_environment != nullptr) http.api_key = from_environment;
  require(!http.api_key.empty() || is_loopback(options.host),
          "--host {}: to serve more than this machine, set TESSERA_API_KEY or --api-key",
          options.host);
  ApiServer server(http);
  LoadedModel loaded = load_model(options.model, options.load);
  require<Unsupported>(loaded.tokenizer != nullptr,
                       "{} came without a tokenizer that this build reads ({})",
                       loaded.path.string(), loaded.no_tokenizer);
  std::string name = options.name;
  if (name.empty()) {
    const auto path = std::filesystem::absolute(options.model).lexically_normal();
    name = (path.has_filename() ? path : path.parent_path()).filename().string();
  }
  const ServedModel model{loaded, name, options.chat_template};
  const StopSignal stop;
  Executor executor(loaded, options.batch);
  std::atomic<bool> has_ended = false;
  std::thread connections([&] {
    server.run(model, executor);
    has_ended = true;
  });
  while (!server.is_running() && !has_ended)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const bool is_v6 = options.host.find(':') != std::string::npos;
  std::cerr << fmt::format("tessera: serving {} on http://{}:{}/v1\n", name,
                           is_v6 ? "[" + options.host + "]" : options.host, server.port());
  while (stop.received() == 0 && !has_ended)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const bool was_stopped = stop.received() != 0;
  executor.stop();
  server.stop();
  connections.join();
  require<IoError>(was_stopped, "the server can't accept connections any more");
  return stop_exit_code(stop.received());
}

#else

int run(const ServeOptions&) {
  throw Unsupported(
      "this build has no HTTP server, because cpp-httplib was not found; tools/setup.sh installs "
      "it");
}

#endif

}  // namespace

Command add_serve(CLI::App& parent) {
  const auto options = std::make_shared<ServeOptions>();
  CLI::App* app = parent.add_subcommand("serve", "Serve a model with OpenAI's HTTP API");
  add_load_options(*app, options->model, options->load);
  app->add_option("--host", options->host, "Address to listen on; others than loopback need a key")
      ->capture_default_str();
  app->add_option("--port", options->port, "TCP port; 0: any that is free")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app->add_option("--api-key", options->api_key,
                  "Key that clients must send; default: the environment variable TESSERA_API_KEY");
  app->add_option("--name", options->name, "Name of the model; default: that of its directory");
  app->add_option("--chat-template", options->chat_template,
                  "File with a chat template; default: the model's");
  app->add_option("--max-requests", options->requests,
                  "Requests served or waiting at once; others get status 503")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app->add_option("--batch", options->batch, "Rows of a request to compute at a time")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  return {app,
          [options] { return with_load_advice(options->load, {}, [&] { return run(*options); }); }};
}

}  // namespace tessera::tools
