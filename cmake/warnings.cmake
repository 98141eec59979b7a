# tessera_warnings: linked privately by every target. -Wshadow only without TESSERA_UNITY, since sources
# compiled together shadow each other's names.
add_library(tessera_warnings INTERFACE)
target_compile_options(tessera_warnings INTERFACE
  -Wall -Wextra -Wpedantic $<$<NOT:$<BOOL:${TESSERA_UNITY}>>:-Wshadow> -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align
  -Wunused -Wdouble-promotion -Wformat=2 -Wimplicit-fallthrough
  $<$<AND:$<BOOL:${TESSERA_UNITY}>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage> $<$<BOOL:${TESSERA_WERROR}>:-Werror>)
if(TESSERA_SANITIZE)
  # Sanitizers prevent `#pragma omp simd`, and clang warns about each loop.
  target_compile_options(tessera_warnings INTERFACE $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>)
endif()

# tessera_library(NAME SOURCES... [LINK ...]): a static library.
function(tessera_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  string(REPLACE "tessera_" "" short ${name})
  add_library(tessera::${short} ALIAS ${name})
  set_target_properties(${name} PROPERTIES EXPORT_NAME ${short})
  target_include_directories(${name} INTERFACE ${TESSERA_PUBLIC_INCLUDE})
  target_compile_features(${name} PUBLIC cxx_std_20)
  if(TESSERA_UNITY)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  endif()
  target_link_libraries(${name} PUBLIC ${ARG_LINK} PRIVATE $<BUILD_INTERFACE:tessera_warnings>)
endfunction()
