# tessera_warnings: linked privately by every target of this project.
add_library(tessera_warnings INTERFACE)
target_compile_options(tessera_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align
  -Wunused -Wdouble-promotion -Wformat=2 -Wimplicit-fallthrough
  $<$<BOOL:${TESSERA_WERROR}>:-Werror>)
if(TESSERA_PRECOMPILED_HEADERS AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 sees overruns in the standard library's strings where there are none, and with headers from
  # elsewhere it inlines, and thus sees, others than without.
  target_compile_options(tessera_warnings INTERFACE
    -Wno-stringop-overread -Wno-stringop-overflow -Wno-array-bounds -Wno-restrict)
endif()
if(TESSERA_SANITIZE)
  # They stand in the way of `#pragma omp simd`, and clang says so for each loop.
  target_compile_options(tessera_warnings INTERFACE $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>)
endif()

# tessera_precompile(NAME KIND): with TESSERA_PRECOMPILED_HEADERS a target takes headers that most of
# its files need from where they were parsed once: for KIND `library`, or `test`, whose options
# differ.
function(tessera_precompile name kind)
  if(NOT TESSERA_PRECOMPILED_HEADERS)
    return()
  endif()
  get_directory_property(options COMPILE_OPTIONS)
  if(options MATCHES "fuzzer-no-link")
    string(APPEND kind _guided)
  endif()
  set(headers tessera_headers_${kind})
  if(NOT TARGET ${headers})
    set(source ${PROJECT_BINARY_DIR}/${headers}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "")
    if(kind MATCHES "^test")
      add_executable(${headers} ${source})  # with the options of executables; its main() is the tests'
      target_link_libraries(${headers} PRIVATE tessera_test_main)
      target_compile_options(${headers} PRIVATE $<$<CONFIG:Release>:-O1>)
      target_precompile_headers(${headers} PRIVATE <doctest/doctest.h>)
    else()
      add_library(${headers} OBJECT ${source})
    endif()
    target_link_libraries(${headers} PRIVATE fmt::fmt nlohmann_json::nlohmann_json Threads::Threads tessera_warnings)
    target_precompile_headers(${headers} PRIVATE
      <algorithm> <array> <atomic> <chrono> <condition_variable> <filesystem> <fstream> <functional> <map>
      <memory> <mutex> <optional> <set> <span> <sstream> <string> <thread> <utility> <vector>
      <fmt/format.h> <nlohmann/json.hpp>)
  endif()
  target_precompile_headers(${name} REUSE_FROM ${headers})
  target_compile_definitions(${name} PRIVATE FMT_SHARED)  # also of those that do not use fmt
endfunction()

# tessera_library(NAME SOURCES... [LINK ...]): a static library with the project's include root.
function(tessera_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  string(REPLACE "tessera_" "" short ${name})
  add_library(tessera::${short} ALIAS ${name})
  set_target_properties(${name} PROPERTIES EXPORT_NAME ${short})
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                            $<INSTALL_INTERFACE:include/tessera>)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PUBLIC ${ARG_LINK} PRIVATE $<BUILD_INTERFACE:tessera_warnings>)
  tessera_precompile(${name} library)
endfunction()
