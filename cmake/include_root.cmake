# Sources of the project include "core/...", relative to its root. Its users include <tessera/...>: a
# copy of the public headers and of those that they need; see public_headers.cmake.
include_directories(${PROJECT_SOURCE_DIR})

set(public_root ${PROJECT_BINARY_DIR}/include)
configure_file(${PROJECT_SOURCE_DIR}/include/tessera/version.h.in ${public_root}/tessera/version.h @ONLY)
file(GLOB public_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/tessera/*.h)
add_custom_command(OUTPUT ${public_root}/tessera/tessera.h
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUT=${public_root}
          -DDEPFILE=${public_root}/headers.d -P ${PROJECT_SOURCE_DIR}/cmake/public_headers.cmake
  COMMAND ${CMAKE_COMMAND} -E touch ${public_root}/tessera/tessera.h
  DEPENDS ${public_headers} ${PROJECT_SOURCE_DIR}/cmake/public_headers.cmake
  DEPFILE ${public_root}/headers.d
  COMMENT "Writing the public headers" VERBATIM)
add_custom_target(tessera_headers ALL DEPENDS ${public_root}/tessera/tessera.h)

set(TESSERA_PUBLIC_INCLUDE $<INSTALL_INTERFACE:include>)
if(NOT PROJECT_IS_TOP_LEVEL)
  list(APPEND TESSERA_PUBLIC_INCLUDE $<BUILD_INTERFACE:${public_root}>)
endif()
