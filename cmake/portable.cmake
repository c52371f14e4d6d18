# Writes files that instantiate the launchers of src/experts/portable/launchers.h, one file per element type, and
# appends their names to ANABRANCH_PORTABLE_INSTANCES. file: the start of these names. Each of the last arguments
# instantiates the launcher once: its tile, then, for a GEMM that can have an adapter, whether it has one.
set(ANABRANCH_PORTABLE_INSTANCES "")
function(anabranch_portable_instances file header operands)
  foreach(elements BFLOAT16 FLOAT16 FLOAT32 TF32)
    if(elements STREQUAL TF32)
      set(arguments "AB_FLOAT32, Precision::tf32")
    else()
      set(arguments "AB_${elements}, Precision::highest")
    endif()
    set(instances "")
    foreach(variant ${ARGN})
      string(APPEND instances
             "template ab_status launch_${header}<${arguments}, TileChoice::${variant}>"
             "(${operands}, int, cudaStream_t);\n")
    endforeach()
    set(path ${PROJECT_BINARY_DIR}/portable/${file}_${elements}.cu)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/portable_instance.cu.in ${path} @ONLY)
    list(APPEND ANABRANCH_PORTABLE_INSTANCES ${path})
  endforeach()
  set(ANABRANCH_PORTABLE_INSTANCES ${ANABRANCH_PORTABLE_INSTANCES} PARENT_SCOPE)
endfunction()

foreach(launcher "up;const Up&" "rows_product;const RowsProduct&" "intermediate_gradient;const IntermediateGradient&")
  list(GET launcher 0 header)
  list(GET launcher 1 operands)
  anabranch_portable_instances(${header} ${header} ${operands} "main, false" "small, false")
  anabranch_portable_instances(${header}_adapter ${header} ${operands} "main, true")
endforeach()
anabranch_portable_instances(weight_gradient weight_gradient
                             "const WeightGradient&, const SegmentBounds&, const SegmentList&" main)
