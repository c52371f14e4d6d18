# libanabranch_cuda.so: the *.cu files, with the checks and handlers that both libraries share.
if(ANABRANCH_CUDA STREQUAL "OFF" OR ANABRANCH_SANITIZE)
  return()
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
  message(STATUS "No CUDA compiler found: libanabranch_cuda.so is not built")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Machine code for Ampere and Hopper, and PTX for what comes after.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

file(GLOB ANABRANCH_CUDA_SOURCES CONFIGURE_DEPENDS src/*/*.cu src/*/cuda/*.cu)
file(GLOB ANABRANCH_HOPPER_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*/hopper/*.cu)
set(ANABRANCH_SHARED_SOURCES src/core/status.cc src/core/structs.cc src/core/tensor.cc src/balance/check.cc
                             src/router/check.cc src/dispatch/check.cc src/dispatch/maps.cc src/dispatch/plan_check.cc
                             src/experts/check.cc)
if(ANABRANCH_XLA)
  list(APPEND ANABRANCH_SHARED_SOURCES src/core/xla.cc src/router/xla.cc src/balance/xla.cc src/dispatch/plan_xla.cc
       src/dispatch/xla.cc src/experts/xla.cc)
endif()
# wgmma and setmaxnreg are instructions of sm_90a alone, whatever else the library is compiled for.
add_library(anabranch_hopper OBJECT ${ANABRANCH_HOPPER_SOURCES})
set_target_properties(anabranch_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real)
target_include_directories(anabranch_hopper PRIVATE include src)
target_include_directories(anabranch_hopper SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# Registers that do not suffice would cost more than any other mistake: ptxas warns.
target_compile_options(anabranch_hopper PRIVATE --expt-relaxed-constexpr -lineinfo -Xptxas=-warn-spills
                                                -Xptxas=-warn-lmem-usage)
target_compile_definitions(anabranch_hopper PRIVATE ANABRANCH_CUDA_WAIT_LIMIT=${ANABRANCH_CUDA_WAIT_LIMIT})

add_library(anabranch_cuda SHARED ${ANABRANCH_CUDA_SOURCES} $<TARGET_OBJECTS:anabranch_hopper>
                                  ${ANABRANCH_SHARED_SOURCES})
target_include_directories(anabranch_cuda PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                 $<INSTALL_INTERFACE:include>
                                          PRIVATE src)
target_include_directories(anabranch_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
if(ANABRANCH_XLA)
  target_include_directories(anabranch_cuda SYSTEM PRIVATE ${JAXLIB_DIR}/include)
endif()
target_compile_definitions(anabranch_cuda PRIVATE ANABRANCH_CUDA ANABRANCH_VERSION="${PROJECT_VERSION}")
target_compile_options(anabranch_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr$<SEMICOLON>-lineinfo$<SEMICOLON>-Xfatbin=-compress-all>)
find_package(Threads REQUIRED)
target_link_libraries(anabranch_cuda PRIVATE Threads::Threads)
target_link_options(anabranch_cuda PRIVATE
                    LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports_cuda.map LINKER:-z,defs)
list(APPEND ANABRANCH_LIBRARIES anabranch_cuda)
