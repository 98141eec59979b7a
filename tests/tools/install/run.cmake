# cmake -DBUILD=... -DSOURCE=... -DWORK=... [-DFLAGS=...] -P run.cmake: installs a build into a fresh
# prefix, then configures, builds and runs the consumer against it alone.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "'${ARGN}' ended with ${code}:\n${text}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -G Ninja -S ${SOURCE} -B ${WORK}/build -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS=${FLAGS}")
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
run(${WORK}/prefix/bin/tessera --version)
# The install tree must not depend on the build tree.
file(GLOB_RECURSE package_files ${WORK}/prefix/*.cmake)
if(NOT package_files)
  message(FATAL_ERROR "no package files in ${WORK}/prefix")
endif()
foreach(file ${package_files})
  file(READ ${file} text)
  string(FIND "${text}" "${BUILD}" at)
  if(NOT at EQUAL -1)
    message(FATAL_ERROR "${file} names the build tree ${BUILD}")
  endif()
endforeach()
file(REMOVE_RECURSE ${WORK})
