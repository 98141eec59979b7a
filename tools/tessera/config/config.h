#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "models/arch.h"

namespace tessera::tools {

/// Configuration of a training run, with its defaults. Ranges and help: fields.cpp.
struct Config {
  struct Model {
    std::string preset;
    std::int64_t depth = 0;  ///< sets other keys, see depth.h; 0: none
    std::string arch = models::Arch().family;
    std::int64_t n_layer = 4;
    std::int64_t n_head = 4;
    std::int64_t n_kv_head = 0;  ///< 0: as the family does it; also the next two
    std::int64_t head_dim = 0;
    std::int64_t n_embd = 128;
    std::int64_t n_inner = 0;
    std::int64_t n_expert = 0;  ///< 0: as the family does it; also the next two
    std::int64_t n_expert_used = 0;
    std::int64_t n_expert_inner = 0;
    double aux_loss = 0.0;
    std::int64_t vocab_size = 0;  ///< 0: from the tokenizer or the data
    std::int64_t seq_len = 64;    ///< tokens
    double dropout = 0.0;
    double layer_norm_eps = 1e-5;
    std::string init_from;
  } model;
  struct Data {
    std::vector<std::string> train;
    std::vector<std::string> val;
    std::string tokenizer = "bytes";
    double val_fraction = 0.1;
    std::string order = "shuffled";
    std::string chat_template;  ///< empty: the tokenizer's
    std::string chat_date = "2024-07-26";
  } data;
  struct Train {
    std::int64_t steps = 1000;
    std::int64_t seed = 1337;
    std::int64_t global_batch = 12;  ///< sequences per step, over all ranks
    std::int64_t micro_batch = 0;    ///< sequences per rank and micro-step; 0: global_batch / world
    std::string device = "auto";     ///< auto, cpu, cuda, cuda:N
    std::string precision = "fp32";
    std::string nonfinite = "stop";
    std::string recompute = "none";
    std::int64_t eval_every = 250;  ///< steps; 0: only at the end
    std::int64_t eval_batches = 20;
    std::int64_t threads = 0;  ///< per rank; 0: the processors divided by the ranks of this host
    std::string memory_check = "refuse";
    std::string deterministic = "on";
    std::string tuned_products;     ///< file; empty: see tuned_products_file()
    std::int64_t memory_limit = 0;  ///< bytes of a rank on the CPU; 0: no limit
    std::int64_t log_every = 10;
    std::string profile;
    std::string sample_prompt;
    std::int64_t sample_tokens = 200;
  } train;
  struct Optim {
    std::string name = "adamw";
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.99;
    double eps = 1e-8;
    double momentum = 0.95;
    double weight_decay = 0.1;
    std::string decay = "all";
    double clip_norm = 1.0;  ///< 0: no clipping
    double ema = 0;          ///< decay of the moving average of the weights; 0: none
    std::int64_t warmup_steps = 100;
    std::string schedule = "cosine";
    double min_lr = 1e-4;               ///< a tenth of lr unless given
    std::vector<std::string> freeze;    ///< name patterns
    std::vector<std::string> lr_scale;  ///< "PATTERN=FACTOR"
  } optim;
  struct Lora {
    std::int64_t rank = 0;  ///< 0: off
    double alpha = 0;       ///< 0: twice the rank
    double dropout = 0;
    std::vector<std::string> targets;  ///< see io::lora_layers(); empty: all-linear
    std::string init_from;
  } lora;
  struct Shard {
    std::string mode = "full";
    std::int64_t group = 0;       ///< ranks per shard group of mode hybrid; 0: the ranks of a host
    std::string units = "block";  ///< see nn::parse_unit_policy()
    std::string reshard_after_forward = "on";
    std::string accumulate = "sharded";
    std::string gradient_dtype = "f32";
    std::string reduce_dtype = "f32";
    std::int64_t gather_ahead = 1;
    std::int64_t reduce_behind = 1;
    std::string offload = "none";
    std::int64_t check_replicas_every = 100;  ///< steps; 0: never
  } shard;
  struct Checkpoint {
    std::int64_t every = 500;  ///< steps; also saves at the end; 0: never saves
    std::string async = "on";
    std::int64_t keep = 3;        ///< newest committed checkpoints to keep; 0: all
    std::int64_t keep_every = 0;  ///< checkpoints at multiples of this are never deleted; 0: none
    std::int64_t keep_best = 0;   ///< number of checkpoints with the lowest validation loss to keep
    std::string on_error = "warn";
    std::string what = "all";
    std::string resume = "auto";
    std::string load_policy = "exact";
    std::vector<std::string> load_tensors;  ///< name patterns; empty: all
    double timeout = 600;                   ///< seconds without progress before a save fails
    double load_timeout = 600;              ///< seconds
  } checkpoint;
  struct Comm {
    std::string backend = "auto";
    double init_timeout = 60;      ///< seconds
    double heartbeat_timeout = 4;  ///< seconds; 0: off
    double timeout = 60;           ///< seconds
    std::string bind;              ///< empty: the rendezvous address
  } comm;
  struct Run {
    std::string out = "runs/default";
    std::string tensorboard = "off";
  } run;

  /// Keys set by a file, the environment or a flag.
  std::set<std::string, std::less<>> given;
  /// Flags that stand for model.depth: "--model.n_layer 4".
  std::vector<std::string> from_depth;

  /// Checks fields against each other and resolves micro_batch 0 and min_lr. Call it before use.
  /// @throws InvalidArgument naming keys, values and the nearest valid ones; Unsupported
  void validate(int world_size, bool needs_data = true);
};

inline std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

/// {"model": {...}, ...} with every field, in the order of fields.cpp; load_config() reads it.
nlohmann::ordered_json to_json(const Config& config);

}  // namespace tessera::tools
