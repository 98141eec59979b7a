# tessera_compile_on_host(TARGET own_kernel.cu ...): compiles CUDA sources as C++ into a target that links
# tessera::fiber, whose kernels then run as fibers on the host. They include <tessera/extend.h> and no
# header of CUDA.
function(tessera_compile_on_host target)
  foreach(source ${ARGN})
    # CMake treats .cu as CUDA only: compile a .cpp that includes it.
    get_filename_component(path ${source} ABSOLUTE)
    get_filename_component(name ${source} NAME_WE)
    set(copy ${CMAKE_CURRENT_BINARY_DIR}/${target}_${name}_cuda.cpp)
    file(GENERATE OUTPUT ${copy} CONTENT "#include \"${path}\"\n")
    target_sources(${target} PRIVATE ${copy})
  endforeach()
endfunction()
