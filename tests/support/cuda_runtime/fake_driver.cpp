// Functions of a CUDA driver that cuDNN needs in order to make plans: kernels are loaded, and there is no GPU to run them.
namespace {
int set(void** result) {
  static char object;
  *result = &object;
  return 0;
}
}  // namespace

extern "C" {
int cuLibraryLoadData(void** library) { return set(library); }
int cuLibraryGetKernel(void** kernel) { return set(kernel); }
int cuKernelGetFunction(void** function) { return set(function); }
int cuLibraryUnload() { return 0; }
}
