# Writes files that instantiate the launchers of src/experts/portable/launchers.h and appends their names to
# ANABRANCH_PORTABLE_INSTANCES. A file has the instances of one element type, without or with adapters; in a build
# without optimisation, all instances of a header (see hopper.cmake).
# anabranch_portable_instances(FILE HEADER OPERANDS VARIANT...) adds the instances of all element types. FILE: the start
# of the names of files. VARIANT: the tile, then, for a GEMM that can have an adapter, whether it has one.
set(ANABRANCH_PORTABLE_INSTANCES "")
macro(anabranch_portable_instances name header operands)
  foreach(elements BFLOAT16 FLOAT16 FLOAT32 TF32)
    if(elements STREQUAL TF32)
      set(arguments "AB_FLOAT32, Precision::tf32")
    else()
      set(arguments "AB_${elements}, Precision::highest")
    endif()
    if(ANABRANCH_CUDA_OPTIMIZE)
      set(file ${PROJECT_BINARY_DIR}/portable/${name}_${elements}.cu)
    else()
      set(file ${PROJECT_BINARY_DIR}/portable/${header}.cu)
    endif()
    if(NOT file IN_LIST ANABRANCH_PORTABLE_INSTANCES)
      list(APPEND ANABRANCH_PORTABLE_INSTANCES ${file})
      set(instances_${file} "")
    endif()
    set(header_${file} ${header})
    foreach(variant ${ARGN})
      string(APPEND instances_${file} "template ab_status launch_${header}<${arguments}, TileChoice::${variant}>"
                                      "(${operands}, int, cudaStream_t);\n")
    endforeach()
  endforeach()
endmacro()

foreach(launcher "up;const Up&" "rows_product;const RowsProduct&" "intermediate_gradient;const IntermediateGradient&")
  list(GET launcher 0 header)
  list(GET launcher 1 operands)
  anabranch_portable_instances(${header} ${header} ${operands} "main, false" "small, false")
  anabranch_portable_instances(${header}_adapter ${header} ${operands} "main, true")
endforeach()
anabranch_portable_instances(weight_gradient weight_gradient
                             "const WeightGradient&, const SegmentBounds&, const SegmentList&" main)

foreach(file ${ANABRANCH_PORTABLE_INSTANCES})
  set(header ${header_${file}})
  set(instances "${instances_${file}}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/portable_instance.cu.in ${file} @ONLY)
endforeach()
