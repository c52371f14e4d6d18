# Writes files that instantiate the launchers of src/experts/hopper/launchers.h, one instance per file.
# anabranch_hopper_instance(NAME HEADER TEMPLATE OPERANDS) writes NAME.cu with an explicit instantiation of TEMPLATE,
# which HEADER defines, and appends it to ANABRANCH_HOPPER_INSTANCES.
set(ANABRANCH_HOPPER_INSTANCES "")
function(anabranch_hopper_instance name header template operands)
  set(file ${PROJECT_BINARY_DIR}/hopper/${name}.cu)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/hopper_instance.cu.in ${file} @ONLY)
  set(ANABRANCH_HOPPER_INSTANCES ${ANABRANCH_HOPPER_INSTANCES} ${file} PARENT_SCOPE)
endfunction()

foreach(columns plain gated interleaved)
  foreach(major mn k)
    set(arguments "HiddenColumns::${columns}, Major::${major}")
    anabranch_hopper_instance(up_${columns}_${major} up "launch_up<${arguments}>" "const Up&, TileChoice")
    anabranch_hopper_instance(hidden_gradient_${columns}_${major} hidden_gradient
                              "launch_hidden_gradient<${arguments}>" "const HiddenGradient&, TileChoice")
  endforeach()
endforeach()
foreach(arguments "Major::mn, RowsEpilogue" "Major::k, RowsEpilogue" "Major::mn, ScaleBiasEpilogue"
                  "Major::k, ScaleBiasEpilogue")
  string(MAKE_C_IDENTIFIER "${arguments}" name)
  anabranch_hopper_instance(rows_product_${name} rows_product "launch_rows_product<${arguments}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(columns plain gated interleaved)
  anabranch_hopper_instance(fp8_up_${columns} fp8_up "launch_fp8_up<HiddenColumns::${columns}>" "const Fp8Up&")
  anabranch_hopper_instance(fp8_hidden_gradient_${columns} fp8_hidden_gradient
                            "launch_fp8_hidden_gradient<HiddenColumns::${columns}>" "const Fp8HiddenGradient&")
endforeach()
foreach(epilogue RowsEpilogue ScaleBiasEpilogue)
  anabranch_hopper_instance(fp8_rows_product_${epilogue} fp8_rows_product "launch_fp8_rows_product<${epilogue}>"
                            "const Fp8RowsProduct&")
endforeach()
foreach(gathered nothing x d_y)
  anabranch_hopper_instance(weight_gradient_${gathered} weight_gradient "launch_weight_gradient<Gathered::${gathered}>"
                            "const WeightGradient&, TileChoice, const SegmentBounds&, const SegmentList&")
endforeach()
