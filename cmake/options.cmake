set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

if(NOT PROJECT_IS_TOP_LEVEL)
  # A parent's `all` builds what it links.
  set_directory_properties(PROPERTIES EXCLUDE_FROM_ALL ON)
elseif(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "build type" FORCE)
endif()

option(TESSERA_CUDA "build the CUDA plugins if nvcc is found" ON)
option(TESSERA_BUILD_TOOLS "build the program tessera" ${PROJECT_IS_TOP_LEVEL})
option(TESSERA_BUILD_TESTS "build the tests" ${PROJECT_IS_TOP_LEVEL})
option(TESSERA_BUILD_BENCH "build the benchmarks" OFF)
option(TESSERA_PYTHON "build the Python package; set by pyproject.toml" OFF)
option(TESSERA_STATIC "link the C++ library, and other libraries that are there as archives, statically" OFF)
if(TESSERA_STATIC)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a .so)
  set(OPENSSL_USE_STATIC_LIBS ON)
  # libgcc stays shared: with glibc's newest unwinder in it, the result would need that glibc.
  add_link_options(-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--as-needed)
endif()
option(TESSERA_GENERIC_CPU "build the CPU kernels once, for any CPU, instead of for x86-64-v3 and v4" OFF)
if(TESSERA_GENERIC_CPU)
  add_compile_definitions(TESSERA_GENERIC_CPU)
endif()
option(TESSERA_FUZZ "also build the fuzz targets; needs clang" OFF)
option(TESSERA_UNITY "compile several sources of a library at once, which is faster" ON)
option(TESSERA_WERROR "treat warnings as errors" OFF)
set(TESSERA_SANITIZE "" CACHE STRING "comma-separated sanitizers: address,undefined or thread")
option(TESSERA_SANITIZE_ALL "with undefined: enable the checks that double compile times, too" OFF)

# -O2 compiles faster, and only kernels, which set their own options, gain from -O3.
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths relative to the checkout, so that clones share cache entries.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    ${TESSERA_CCACHE})
endif()

# Instruments a folder's parsers for coverage-guided fuzzing.
macro(tessera_guide_fuzzer)
  if(TESSERA_FUZZ)
    add_compile_options(-fsanitize=fuzzer-no-link)
  endif()
endmacro()
if(TESSERA_SANITIZE)
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
  if(NOT TESSERA_SANITIZE_ALL)
    add_compile_options(-fno-sanitize=null,vptr,object-size,alignment
      $<$<CXX_COMPILER_ID:GNU>:-fno-sanitize-address-use-after-scope>)
  endif()
endif()
