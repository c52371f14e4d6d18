# The instances of the launchers of src/experts/portable/launchers.h (see instances.cmake). A file has those of one
# element type, without or with adapters.
# anabranch_portable_instances(FILE HEADER OPERANDS VARIANT...) adds the instances of all element types. FILE: the start
# of the names of files. VARIANT: the tile, then, for a GEMM that can have an adapter, whether it has one.
include(${PROJECT_SOURCE_DIR}/cmake/instances.cmake)
set(INSTANCES_OF_portable "")
macro(anabranch_portable_instances name header operands)
  foreach(elements BFLOAT16 FLOAT16 FLOAT32 TF32)
    if(elements STREQUAL TF32)
      set(arguments "AB_FLOAT32, Precision::tf32")
    else()
      set(arguments "AB_${elements}, Precision::highest")
    endif()
    foreach(variant ${ARGN})
      anabranch_add_instance(portable ${name}_${elements} ${header}
                             "launch_${header}<${arguments}, TileChoice::${variant}>" ${operands})
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

foreach(format Mxfp4 Fp8Blocks)
  foreach(elements BFLOAT16 FLOAT16)
    foreach(tile main small)
      set(arguments "AB_${elements}, TileChoice::${tile}")
      anabranch_add_instance(portable packed_up_${format}_${elements} packed_up
                             "launch_packed_up<${format}, ${arguments}>" "const PackedUp&")
      anabranch_add_instance(portable packed_intermediate_gradient_${format}_${elements} packed_intermediate_gradient
                             "launch_packed_intermediate_gradient<${format}, ${arguments}>"
                             "const PackedIntermediateGradient&")
      foreach(major mn k)
        anabranch_add_instance(portable packed_rows_product_${format}_${elements} packed_rows_product
                               "launch_packed_rows_product<${format}, Major::${major}, ${arguments}>"
                               "const PackedRowsProduct&")
      endforeach()
    endforeach()
  endforeach()
endforeach()

anabranch_write_instances(portable)
