# cmake -DSOURCE=... -DMODULE=... -DWORK=... -P run.cmake: configures the project in SOURCE with
# incomplete toolkits.
set(ENV{CPATH} "")
file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/include/cublasLt.h "")
file(WRITE ${WORK}/include/nvtx3/nvToolsExt.h "")
file(WRITE ${WORK}/cublas_alone/cublasLt.h "")
file(WRITE ${WORK}/nvtx_alone/nvtx3/nvToolsExt.h "")

# check(GAP NVCC FOUND INCLUDE LIBRARIES): checks the messages on such a toolkit.
function(check gap nvcc found include libraries)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -DMODULE=${MODULE} -DNVCC=${nvcc} -DFOUND=${found}
            -DINCLUDE=${WORK}/${include} "-DLIBRARIES=${libraries}"
    RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(FIND "${text}" "-- gap: '${gap}'\n" at)
  if(NOT code EQUAL 0 OR at EQUAL -1)
    message(SEND_ERROR "expected the gap '${gap}', and exit code 0; got ${code}:\n${text}")
  endif()
  file(REMOVE_RECURSE ${WORK}/build)
endfunction()

set(all "cudart_static;cublasLt")
check("" 12.8.61 TRUE include "${all}")
check("" 13.0.88 TRUE include "${all}")
check("nvcc 12.0.140 is older than 12.8" 12.0.140 TRUE include "${all}")
check("nvcc 12.0.140 is older than 12.8" 12.0.140 FALSE none "")
check("nvcc 12.8.61 was found without the rest of the CUDA toolkit" 12.8.61 FALSE none "")
check("the CUDA toolkit has no libcudart_static" 13.0.88 TRUE include cublasLt)
check("the CUDA toolkit has no libcublasLt" 13.0.88 TRUE include cudart_static)
check("the CUDA toolkit has no cublasLt.h" 13.0.88 TRUE nvtx_alone "${all}")
check("the CUDA toolkit has no nvtx3/nvToolsExt.h" 13.0.88 TRUE cublas_alone "${all}")
# A package's headers may lie in a folder that only the environment names.
set(ENV{CPATH} ${WORK}/nvtx_alone)
check("" 13.0.88 TRUE cublas_alone "${all}")
file(REMOVE_RECURSE ${WORK})
