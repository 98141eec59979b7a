#include "kernels/cross_entropy.h"

#include "kernels/checks.h"

namespace tessera::kernels {
namespace {

void check(const Context& context, const CrossEntropy& args) {
  check_device("cross_entropy", "logits", context, args.logits);
  check_device("cross_entropy", "targets", context, args.targets);
  check_device("cross_entropy", "losses", context, args.losses);
  const TensorView& logits = args.logits;
  check_computing_dtype("cross_entropy", "logits", logits);
  require(logits.shape.size() == 2 && logits.shape[1] >= 1,
          "cross_entropy: logits must have shape [rows, vocabulary], got {}", logits.shape);
  require(logits.shape[1] == 1 || logits.strides[1] == 1,
          "cross_entropy: the last dim of logits must be contiguous, got shape {} with strides {}",
          logits.shape, logits.strides);
  check_dtype("cross_entropy", "targets", args.targets, DType::I32);
  check_shape("cross_entropy", "targets", args.targets, {logits.shape[0]});
  check_contiguous("cross_entropy", "targets", args.targets);
  check_dtype("cross_entropy", "losses", args.losses, accumulator_dtype(logits.dtype));
  check_shape("cross_entropy", "losses", args.losses, {logits.shape[0]});
  check_contiguous("cross_entropy", "losses", args.losses);
}

// Before anything is written: a refused call leaves logits and losses as they were.
void check_targets(const CrossEntropy& args) {
  const auto* targets = args.targets.as<const std::int32_t>();
  const std::int64_t vocabulary = args.logits.shape[1];
  for (std::int64_t row = 0; row < args.targets.shape[0]; ++row)
    require(targets[row] == kIgnoreTarget || (targets[row] >= 0 && targets[row] < vocabulary),
            "cross_entropy: the target of row {} is {}, outside the vocabulary of {} (or {} to "
            "ignore the row)",
            row, targets[row], vocabulary, kIgnoreTarget);
}

}  // namespace

TESSERA_CPU_KERNEL(cross_entropy, CrossEntropy)

void cross_entropy(Context& context, const CrossEntropy& args) {
  check(context, args);
  if (args.logits.shape[0] == 0) return;
  if (context.device().type == DeviceType::CPU) check_targets(args);
  TESSERA_DISPATCH(cross_entropy, context, args);
}

}  // namespace tessera::kernels
