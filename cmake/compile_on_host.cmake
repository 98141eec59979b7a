# tessera_compile_on_host(TARGET own_kernel.cu ...): compiles CUDA sources as C++ into a target that links
# tessera::fiber, whose kernels then run as fibers on the host. They include <tessera/extend.h> and no
# header of CUDA.
# Without sanitizers, their accesses to global memory are checked for races.
function(tessera_compile_on_host target)
  foreach(source ${ARGN})
    # CMake treats .cu as CUDA only: compile a .cpp that includes it.
    get_filename_component(path ${source} ABSOLUTE)
    get_filename_component(name ${source} NAME_WE)
    set(copy ${CMAKE_CURRENT_BINARY_DIR}/${target}_${name}_cuda.cpp)
    file(GENERATE OUTPUT ${copy} CONTENT "#include \"${path}\"\n")
    target_sources(${target} PRIVATE ${copy})
    tessera_check_global_memory(${copy})
  endforeach()
endfunction()

# Reports the accesses of kernels in these C++ sources to the fibers, by the calls that compilers insert for the thread
# sanitizer; tessera::fiber defines them. Excludes other sanitizers.
function(tessera_check_global_memory)
  get_property(flags DIRECTORY PROPERTY COMPILE_OPTIONS)
  if(NOT "${CMAKE_CXX_FLAGS};${flags}" MATCHES "-fsanitize")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fsanitize=thread
      $<$<CXX_COMPILER_ID:GNU>:--param=tsan-instrument-func-entry-exit=0>
      $<$<CXX_COMPILER_ID:Clang>:SHELL:-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-atomics=0>)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS TESSERA_CHECKS_GLOBAL_MEMORY)
  endif()
endfunction()
