# Files that instantiate the launchers of src/experts/hopper/launchers.h, one each: anabranch_hopper_instance(NAME HEADER
# TEMPLATE) writes NAME.cu with an explicit instantiation of TEMPLATE, which HEADER defines, and appends it to
# ANABRANCH_HOPPER_INSTANCES.
set(ANABRANCH_HOPPER_INSTANCES "")
function(anabranch_hopper_instance name header template operands)
  set(file ${PROJECT_BINARY_DIR}/hopper/${name}.cu)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/hopper_instance.cu.in ${file} @ONLY)
  set(ANABRANCH_HOPPER_INSTANCES ${ANABRANCH_HOPPER_INSTANCES} ${file} PARENT_SCOPE)
endfunction()

foreach(parts 1 2)
  anabranch_hopper_instance(up_${parts} up launch_up<${parts}> "const Up&, TileChoice")
  anabranch_hopper_instance(hidden_gradient_${parts} hidden_gradient launch_hidden_gradient<${parts}>
                            "const HiddenGradient&, TileChoice")
endforeach()
foreach(arguments "Major::mn, RowsEpilogue" "Major::k, RowsEpilogue" "Major::mn, ScaleBiasEpilogue")
  string(MAKE_C_IDENTIFIER "${arguments}" name)
  anabranch_hopper_instance(rows_product_${name} rows_product "launch_rows_product<${arguments}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(gathered nothing x d_y)
  anabranch_hopper_instance(weight_gradient_${gathered} weight_gradient "launch_weight_gradient<Gathered::${gathered}>"
                            "const WeightGradient&, TileChoice, const SegmentBounds&, const SegmentList&")
endforeach()
