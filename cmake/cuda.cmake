# libanabranch_cuda.so: the *.cu files, the host code that needs no CUDA compiler, and the checks and handlers that both
# libraries contain.
set(ANABRANCH_CUDA_SUMMARY "off")
if(ANABRANCH_CUDA STREQUAL "OFF" OR ANABRANCH_SANITIZE)
  return()
endif()

# Compiling for CUDA takes minutes. AUTO skips it on a machine without a GPU; ANABRANCH_CUDA=ON forces it.
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
  # Architectures of a release: machine code for Ampere (which also runs on Ada), Hopper and both Blackwells. The PTX is
  # that of the first Blackwell (10.0); it serves 11.0, which runs neither Blackwell's machine code, and later
  # architectures.
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

# Without optimisation the kernels compile in a third of the time and are too slow to use. Tested with nvcc 13.0.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  set(ANABRANCH_CUDA_OPTIMIZE ON)
endif()

anabranch_glob(ANABRANCH_CUDA_SOURCES src/*.cu)
set(ANABRANCH_HOPPER_SOURCES ${ANABRANCH_CUDA_SOURCES})
list(FILTER ANABRANCH_HOPPER_SOURCES INCLUDE REGEX "^src/experts/hopper/")
list(FILTER ANABRANCH_CUDA_SOURCES EXCLUDE REGEX "^src/experts/hopper/")
include(cmake/hopper.cmake)
list(APPEND ANABRANCH_HOPPER_SOURCES ${INSTANCES_OF_hopper})
include(cmake/portable.cmake)
list(APPEND ANABRANCH_CUDA_SOURCES ${INSTANCES_OF_portable})

# Options for all CUDA sources. Line numbers, for profilers and sanitizers, account for two thirds of the size of a
# library that contains them, so Release omits them.
set(ANABRANCH_CUDA_OPTIONS --expt-relaxed-constexpr -Xfatbin=-compress-all $<$<NOT:$<CONFIG:Release>>:-lineinfo>)

if(NOT ANABRANCH_CUDA_OPTIMIZE)
  list(APPEND ANABRANCH_CUDA_OPTIONS --Ofast-compile=max)
  string(APPEND ANABRANCH_CUDA_SUMMARY ", without optimisation")
endif()

# Let ptxas warn about spilled registers in the tensor core kernels, where spills cost more than any other mistake. The
# other kernels are tuned for Hopper: they get the warning in test builds (warnings are errors) for Hopper.
set(ANABRANCH_SPILL_WARNINGS "")
if(ANABRANCH_CUDA_OPTIMIZE)
  set(ANABRANCH_SPILL_WARNINGS -Xptxas=-warn-spills -Xptxas=-warn-lmem-usage)
endif()
set(ANABRANCH_FEW_ROWS_SOURCES ${ANABRANCH_CUDA_SOURCES})
list(FILTER ANABRANCH_FEW_ROWS_SOURCES INCLUDE REGEX "^src/experts/few_rows/")
set_source_files_properties(${INSTANCES_OF_portable} ${ANABRANCH_FEW_ROWS_SOURCES} PROPERTIES
                            COMPILE_OPTIONS "${ANABRANCH_SPILL_WARNINGS}")

# Only sm_90a has wgmma and setmaxnreg, so these files are compiled for it, whatever the architectures of the library.
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
if(ANABRANCH_WERROR AND ANABRANCH_CUDA_OPTIMIZE AND CMAKE_CUDA_ARCHITECTURES MATCHES "^90a?(-real)?$")
  target_compile_options(anabranch_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills>")
endif()
find_package(Threads REQUIRED)
target_link_libraries(anabranch_cuda PRIVATE Threads::Threads)
target_link_options(anabranch_cuda PRIVATE
                    LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports_cuda.map LINKER:-z,defs)
list(APPEND ANABRANCH_LIBRARIES anabranch_cuda)
