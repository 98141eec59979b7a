#include "kernels/matmul.h"

#include "kernels/activation.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(matmul, Matmul)

namespace {

bool is_planned_on_gpu(const Context& context) {
  return context.device().type == DeviceType::Meta && context.target().type == DeviceType::CUDA;
}

void product(Context& context, const Matmul& args) {
  if (args.c.numel() == 0) return;
  if (is_planned_on_gpu(context)) context.plan_library("cuBLASLt", cuda::kMostMatmulWorkspace);
  if (args.a.dtype != DType::F64) TESSERA_DISPATCH_WITH_SCRATCH(matmul, context, args);
  TESSERA_DISPATCH(matmul, context, args);
}

bool fused(Context& context, const Matmul& args) {
  if (args.c.numel() == 0 || args.a.numel() == 0) return false;
  const bool planned = is_planned_on_gpu(context) && args.a.dtype == DType::BF16;
  if (!planned && context.device().type != DeviceType::CUDA) return false;
  const char* name = args.epilogue == Epilogue::Gelu ? "matmul_gelu" : "matmul_gelu_backward";
  KernelRange range(context, name, [&] { return work(args); });
  if (planned) {  // books what the product alone does
    context.plan_library("cuBLASLt", cuda::kMostMatmulWorkspace);
    plan_scratch("matmul", context, args);
    return true;
  }
  bool done = false;
  const FusedMatmul offer{args, done};
  run_on_device("matmul_fused", context, &offer);
  if (!done) range.drop();
  return done;
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  require<InternalError>(
      !args.residual.defined() || (!args.accumulate && args.epilogue == Epilogue::None),
      "matmul: a residual with accumulate or an epilogue");
  const bool on_cpu = context.target().type == DeviceType::CPU;
  if (args.epilogue == Epilogue::None || on_cpu) return product(context, args);
  if (fused(context, args)) return;
  Matmul plain = args;
  plain.epilogue = Epilogue::None;
  plain.pre = {};
  switch (args.epilogue) {
    case Epilogue::None:
      break;
    case Epilogue::Gelu:
      if (args.pre.defined()) plain.c = args.pre;
      product(context, plain);
      gelu_forward(context, {plain.c, args.c});
      break;
    case Epilogue::GeluGradient:
      product(context, plain);
      gelu_backward(context, {args.pre, args.c, {args.c, false, true}});
      break;
  }
}

}  // namespace tessera::kernels
