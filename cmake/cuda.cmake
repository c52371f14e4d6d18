# libanabranch_cuda.so: the *.cu files, host code that needs no CUDA compiler, and the checks and handlers of both
# libraries.
set(ANABRANCH_CUDA_SUMMARY "off")
if(ANABRANCH_CUDA STREQUAL "OFF" OR ANABRANCH_SANITIZE)
  return()
endif()

# AUTO builds only for GPUs of this machine, since compiling for others takes minutes. ANABRANCH_CUDA=ON builds for all.
if(ANABRANCH_CUDA STREQUAL "AUTO" AND NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET)
  if(NOT gpus MATCHES "^GPU ")
    set(ANABRANCH_CUDA_SUMMARY
        "none, no GPU was found; for every GPU: pip install . --config-settings=cmake.define.ANABRANCH_CUDA=ON")
    return()
  endif()
  set(CMAKE_CUDA_ARCHITECTURES native)
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(ANABRANCH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ANABRANCH_CUDA=ON: no CUDA compiler found; set CUDACXX or CMAKE_CUDA_COMPILER")
  endif()
  set(ANABRANCH_CUDA_SUMMARY "none, no CUDA compiler was found; name one by CUDACXX or CMAKE_CUDA_COMPILER")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  # The release's set: machine code for Ampere (Ada runs it too), Hopper and both Blackwells. PTX is that of 10.0, not of
  # 12.0: 11.0 runs neither's machine code and compiles PTX of its own or an older capability, as do later devices.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120-real)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
string(REPLACE ";" ", " architectures "${CMAKE_CUDA_ARCHITECTURES}")
set(ANABRANCH_CUDA_SUMMARY
    "${CMAKE_CUDA_COMPILER_VERSION} for ${architectures}; Hopper's tensor cores 90a-real")

anabranch_glob(ANABRANCH_CUDA_SOURCES src/*.cu)
set(ANABRANCH_HOPPER_SOURCES ${ANABRANCH_CUDA_SOURCES})
list(FILTER ANABRANCH_HOPPER_SOURCES INCLUDE REGEX "^src/experts/hopper/")
list(REMOVE_ITEM ANABRANCH_CUDA_SOURCES ${ANABRANCH_HOPPER_SOURCES})
include(cmake/hopper.cmake)
list(APPEND ANABRANCH_HOPPER_SOURCES ${ANABRANCH_HOPPER_INSTANCES})
include(cmake/portable.cmake)
list(APPEND ANABRANCH_CUDA_SOURCES ${ANABRANCH_PORTABLE_INSTANCES})

# Compile options of every CUDA source. Line numbers, for profilers and sanitizers, would triple the size of a library, so
# Release has none.
set(ANABRANCH_CUDA_OPTIONS --expt-relaxed-constexpr -Xfatbin=-compress-all $<$<NOT:$<CONFIG:Release>>:-lineinfo>)

# Spilled registers would slow the tensor-core kernels more than any other mistake, so ptxas warns. Other kernels are
# designed for Hopper's registers: they get this warning below, in test builds for Hopper, where warnings are errors.
set(ANABRANCH_SPILL_WARNINGS -Xptxas=-warn-spills -Xptxas=-warn-lmem-usage)
set(ANABRANCH_FEW_ROWS_SOURCES ${ANABRANCH_CUDA_SOURCES})
list(FILTER ANABRANCH_FEW_ROWS_SOURCES INCLUDE REGEX "^src/experts/few_rows/")
set_source_files_properties(${ANABRANCH_PORTABLE_INSTANCES} ${ANABRANCH_FEW_ROWS_SOURCES} PROPERTIES
                            COMPILE_OPTIONS "${ANABRANCH_SPILL_WARNINGS}")

# wgmma and setmaxnreg exist only on sm_90a, whatever else the library is compiled for.
add_library(anabranch_hopper OBJECT ${ANABRANCH_HOPPER_SOURCES})
set_target_properties(anabranch_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real)
target_include_directories(anabranch_hopper PRIVATE include src)
target_include_directories(anabranch_hopper SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_options(anabranch_hopper PRIVATE ${ANABRANCH_CUDA_OPTIONS} ${ANABRANCH_SPILL_WARNINGS})
target_compile_definitions(anabranch_hopper PRIVATE ANABRANCH_CUDA_WAIT_LIMIT=${ANABRANCH_CUDA_WAIT_LIMIT})

add_library(anabranch_cuda SHARED ${ANABRANCH_CUDA_SOURCES} ${ANABRANCH_CUDA_HOST_SOURCES}
                                  $<TARGET_OBJECTS:anabranch_hopper> $<TARGET_OBJECTS:anabranch_common>)
target_include_directories(anabranch_cuda PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<INSTALL_INTERFACE:include>
                                          PRIVATE src)
target_include_directories(anabranch_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_definitions(anabranch_cuda PRIVATE ANABRANCH_CUDA ANABRANCH_VERSION="${PROJECT_VERSION}")
if(ANABRANCH_XLA)
  anabranch_xla_sources(anabranch_cuda)
endif()
target_compile_options(anabranch_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${ANABRANCH_CUDA_OPTIONS}>")
if(ANABRANCH_WERROR AND CMAKE_CUDA_ARCHITECTURES MATCHES "^90a?(-real)?$")
  target_compile_options(anabranch_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills>")
endif()
find_package(Threads REQUIRED)
target_link_libraries(anabranch_cuda PRIVATE Threads::Threads)
target_link_options(anabranch_cuda PRIVATE
                    LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports_cuda.map LINKER:-z,defs)
list(APPEND ANABRANCH_LIBRARIES anabranch_cuda)
