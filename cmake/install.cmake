# Install tree for find_package(tessera): static libraries, headers under include/tessera, the binary and a
# package file that finds the dependencies.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
set_target_properties(tessera_isal PROPERTIES EXPORT_NAME isal)
install(TARGETS tessera_base tessera_kernels tessera_core tessera_models tessera_comm tessera_sharding
                tessera_io tessera_data tessera_train tessera_isal
  EXPORT tessera_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS tessera RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET tessera_cuda)  # the program loads plugins from lib/tessera
  foreach(plugin tessera_cuda tessera_cudnn tessera_nccl)
    if(TARGET ${plugin})
      install(TARGETS ${plugin} LIBRARY DESTINATION lib/tessera)
    endif()
  endforeach()
endif()

foreach(folder core kernels models comm io train)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera
    FILES_MATCHING PATTERN "*.h" PATTERN "kernels/cpu" EXCLUDE)
endforeach()

install(EXPORT tessera_targets NAMESPACE tessera:: DESTINATION ${package_dir}
  FILE tesseraTargets.cmake)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tesseraConfig.cmake.in
  ${PROJECT_BINARY_DIR}/tesseraConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
  DESTINATION ${package_dir})
