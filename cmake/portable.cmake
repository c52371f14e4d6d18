# Files that instantiate the launchers of src/experts/portable/launchers.h for a dtype each; their names are appended to
# ANABRANCH_PORTABLE_INSTANCES.
set(ANABRANCH_PORTABLE_INSTANCES "")
function(anabranch_portable_instances header operands)
  foreach(dtype BFLOAT16 FLOAT16 FLOAT32)
    set(instances "")
    foreach(tile ${ARGN})
      string(APPEND instances
             "template ab_status launch_${header}<AB_${dtype}, TileChoice::${tile}>(${operands}, int, cudaStream_t);\n")
    endforeach()
    set(file ${PROJECT_BINARY_DIR}/portable/${header}_${dtype}.cu)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/portable_instance.cu.in ${file} @ONLY)
    list(APPEND ANABRANCH_PORTABLE_INSTANCES ${file})
  endforeach()
  set(ANABRANCH_PORTABLE_INSTANCES ${ANABRANCH_PORTABLE_INSTANCES} PARENT_SCOPE)
endfunction()

anabranch_portable_instances(up "const Up&" main small)
anabranch_portable_instances(rows_product "const RowsProduct&" main small)
anabranch_portable_instances(hidden_gradient "const HiddenGradient&" main small)
anabranch_portable_instances(weight_gradient "const WeightGradient&, const SegmentBounds&, const SegmentList&" main)
