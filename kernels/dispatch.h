#pragma once

#include <string_view>

#include "core/base/context.h"
#include "core/base/tensor_view.h"
#include "core/base/trace.h"
#include "kernels/scratch.h"
#include "kernels/work.h"

// Dispatch by device. In kernels/<family>.cpp, TESSERA_KERNEL(gelu_forward, GeluForward) defines
// `void gelu_forward(Context&, const GeluForward&)`. Operations (core/ops) check the arguments;
// kernels and dispatch do not check them again.

#if defined(__x86_64__) && !defined(TESSERA_GENERIC_CPU)
#define TESSERA_CPU_KERNEL(name, Args) \
  namespace cpu::v3 {                  \
  void name(Context&, const Args&);    \
  }                                    \
  namespace cpu::v4 {                  \
  void name(Context&, const Args&);    \
  }
#define TESSERA_CPU_DISPATCH(name, context, args)                             \
  return (context).cpu_level() == CpuLevel::V4 ? cpu::v4::name(context, args) \
                                               : cpu::v3::name(context, args)
#else
#define TESSERA_CPU_KERNEL(name, Args) \
  namespace cpu::generic {             \
  void name(Context&, const Args&);    \
  }
#define TESSERA_CPU_DISPATCH(name, context, args) return cpu::generic::name(context, args)
#endif

/// Runs the kernel of the context's device; meta devices compute nothing, and book the scratch memory
/// of a planned GPU.
#define TESSERA_DISPATCH(name, context, args)                                                  \
  do {                                                                                         \
    const ::tessera::KernelRange kernel_range(context, #name,                                  \
                                              [&] { return ::tessera::kernels::work(args); }); \
    switch ((context).device().type) {                                                         \
      case DeviceType::Meta:                                                                   \
        ::tessera::kernels::plan_scratch(#name, context, args);                                \
        return;                                                                                \
      case DeviceType::CPU:                                                                    \
        TESSERA_CPU_DISPATCH(name, context, args);                                             \
        break;                                                                                 \
      case DeviceType::CUDA:                                                                   \
        if (::tessera::kernels::run_on_device(#name, context, &(args))) return;                \
        break;                                                                                 \
    }                                                                                          \
    ::tessera::kernels::throw_no_kernel(#name, (context).device());                            \
  } while (false)

/// The same for kernels with scratch memory, which run on meta devices until they have booked it:
/// there they return where Workspace::is_planned().
#define TESSERA_DISPATCH_WITH_SCRATCH(name, context, args)                                       \
  do {                                                                                           \
    if ((context).device().type == DeviceType::Meta &&                                           \
        (context).target().type == DeviceType::CPU) {                                            \
      const ::tessera::KernelRange kernel_range(context, #name,                                  \
                                                [&] { return ::tessera::kernels::work(args); }); \
      TESSERA_CPU_DISPATCH(name, context, args);                                                 \
    }                                                                                            \
    TESSERA_DISPATCH(name, context, args);                                                       \
  } while (false)

#define TESSERA_KERNEL(name, Args) TESSERA_KERNEL_IF(name, Args, true)

/// @param condition  expression on `args`; if false, the kernel is not run
#define TESSERA_KERNEL_IF(name, Args, condition)          \
  TESSERA_CPU_KERNEL(name, Args)                          \
  void name(Context& context, const Args& args) {         \
    if (condition) TESSERA_DISPATCH(name, context, args); \
  }

namespace tessera::kernels {

/// @throws Unsupported, which names the kernel and the device
[[noreturn]] void throw_no_kernel(std::string_view kernel, Device device);

/// Starts a kernel of the context's device backend. @return false if the backend lacks it
/// @throws OutOfMemory, with the memory ledger in the message
bool run_on_device(std::string_view kernel, Context& context, const void* args);

/// Books the scratch memory that a planned GPU would use for the kernel.
template <typename Args>
void plan_scratch(const char* kernel, Context& context, const Args& args) {
  if (context.target().type == DeviceType::CUDA)
    cuda::plan_scratch(context, kernel, cuda::scratch_bytes(context.limits(), args));
}

// Checks for kernels that are called directly, not by an operation. Messages name the kernel and
// the argument and give the values.

void check_device(std::string_view kernel, std::string_view argument, const Context& context,
                  const TensorView& view);
void check_shape(std::string_view kernel, std::string_view argument, const TensorView& view,
                 const Shape& expected);
/// Checks device, dtype and contiguity.
void check_dense(std::string_view kernel, std::string_view argument, const Context& context,
                 const TensorView& view, DType dtype);
/// Checks device, dtype, and that there is one element.
void check_single(std::string_view kernel, std::string_view argument, const Context& context,
                  const TensorView& view, DType dtype);
/// @throws Unsupported unless the dtype is f64, f32 or bf16
void check_computing_dtype(std::string_view kernel, std::string_view argument,
                           const TensorView& view);

/// f64 for f64, else f32.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::F64 ? DType::F64 : DType::F32;
}

}  // namespace tessera::kernels
