# In place of CMake's own: finds what the command line says.
set(CUDAToolkit_FOUND ${FOUND})
set(CUDAToolkit_INCLUDE_DIRS ${INCLUDE})
foreach(library IN LISTS LIBRARIES)
  add_library(CUDA::${library} INTERFACE IMPORTED)
endforeach()
