# Install tree for find_package(tessera COMPONENTS ...) and pkg-config: static libraries, public headers,
# the program and its plugins. A component has an export set of its own, so that a consumer needs the
# dependencies of what it uses.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
function(tessera_install_component component)
  set(targets "")
  foreach(target ${ARGN})
    if(TARGET ${target})
      list(APPEND targets ${target})
    endif()
  endforeach()
  if(targets)
    install(TARGETS ${targets} EXPORT tessera_${component} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} ${optional})
    install(EXPORT tessera_${component} NAMESPACE tessera:: DESTINATION ${package_dir} FILE tessera-${component}.cmake)
  endif()
endfunction()
tessera_install_component(base tessera_base)
tessera_install_component(io tessera_io tessera_data)
tessera_install_component(core tessera_kernels tessera_core)
tessera_install_component(models tessera_models)
tessera_install_component(comm tessera_comm tessera_sharding)
tessera_install_component(train tessera_train)
tessera_install_component(cuda tessera_cuda_launch)
set(optional OPTIONAL)  # no part of the target tessera
tessera_install_component(testing tessera_fiber)

install(TARGETS tessera RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
foreach(plugin tessera_onednn tessera_parquet tessera_cuda tessera_cudnn tessera_nccl)
  if(TARGET ${plugin})
    install(TARGETS ${plugin} LIBRARY DESTINATION lib/tessera)
  endif()
endforeach()
# For other languages, with <tessera/c_api.h>.
install(TARGETS tessera_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET tessera_cuda_fiber)
  install(TARGETS tessera_cuda_fiber LIBRARY DESTINATION lib/tessera OPTIONAL)
endif()

install(DIRECTORY ${PROJECT_BINARY_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tessera)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/tesseraConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/compile_on_host.cmake DESTINATION ${package_dir})

# Archives, dependents first.
set(pc_io "-ltessera_data -ltessera_io -ltessera_base -lisal -lzstd -lpcre2-8 -lsentencepiece -lutf8proc")
set(pc_all "-ltessera_models -ltessera_train -ltessera_sharding -ltessera_comm -ltessera_core -ltessera_kernels ${pc_io}")
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
foreach(package tessera tessera-io)
  if(package STREQUAL tessera)
    set(pc_libs ${pc_all})
    set(pc_requires "fmt >= 9, libcrypto >= 3")
  else()
    set(pc_libs ${pc_io})
    set(pc_requires "fmt >= 9")
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/tessera.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
