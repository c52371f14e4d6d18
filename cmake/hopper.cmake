# The instances of the launchers of src/experts/hopper/launchers.h, one per file (see instances.cmake).
include(${PROJECT_SOURCE_DIR}/cmake/instances.cmake)
set(INSTANCES_OF_hopper "")

foreach(layout ungated gated interleaved)
  foreach(major mn k)
    set(arguments "GateUpLayout::${layout}, Major::${major}")
    anabranch_add_instance(hopper up_${layout}_${major} up "launch_up<${arguments}>" "const Up&, TileChoice")
    anabranch_add_instance(hopper intermediate_gradient_${layout}_${major} intermediate_gradient
                              "launch_intermediate_gradient<${arguments}>" "const IntermediateGradient&, TileChoice")
  endforeach()
endforeach()
foreach(major mn k)
  anabranch_add_instance(hopper part_of_up_${major} up "launch_part_of_up<Major::${major}>" "const Up&, TileChoice")
  anabranch_add_instance(hopper part_of_intermediate_gradient_${major} intermediate_gradient
                            "launch_part_of_intermediate_gradient<Major::${major}>"
                            "const IntermediateGradient&, TileChoice")
endforeach()
foreach(arguments "Major::mn, RowsEpilogue" "Major::k, RowsEpilogue" "Major::mn, ScaleBiasEpilogue"
                  "Major::k, ScaleBiasEpilogue")
  string(MAKE_C_IDENTIFIER "${arguments}" name)
  anabranch_add_instance(hopper rows_product_${name} rows_product "launch_rows_product<${arguments}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(major mn k)
  anabranch_add_instance(hopper thin_product_${major} thin_product "launch_thin_product<Major::${major}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(layout ungated gated interleaved)
  anabranch_add_instance(hopper fp8_up_${layout} fp8_up "launch_fp8_up<GateUpLayout::${layout}>" "const Fp8Up&")
  anabranch_add_instance(hopper fp8_intermediate_gradient_${layout} fp8_intermediate_gradient
                            "launch_fp8_intermediate_gradient<GateUpLayout::${layout}>" "const Fp8IntermediateGradient&")
endforeach()
foreach(epilogue RowsEpilogue ScaleBiasEpilogue)
  anabranch_add_instance(hopper fp8_rows_product_${epilogue} fp8_rows_product "launch_fp8_rows_product<${epilogue}>"
                            "const Fp8RowsProduct&")
endforeach()
foreach(arguments "Mxfp4, GateUpLayout::gated" "Mxfp4, GateUpLayout::interleaved" "Fp8Blocks, GateUpLayout::gated")
  string(MAKE_C_IDENTIFIER "${arguments}" name)
  anabranch_add_instance(hopper packed_up_${name} packed_up "launch_packed_up<${arguments}>" "const PackedUp&")
  anabranch_add_instance(hopper packed_intermediate_gradient_${name} packed_intermediate_gradient
                            "launch_packed_intermediate_gradient<${arguments}>" "const PackedIntermediateGradient&")
endforeach()
foreach(format Mxfp4 Fp8Blocks)
  foreach(major mn k)
    anabranch_add_instance(hopper packed_rows_product_${format}_${major} packed_rows_product
                              "launch_packed_rows_product<${format}, Major::${major}>" "const PackedRowsProduct&")
  endforeach()
endforeach()
foreach(paired x d_y)
  foreach(major mn k)
    anabranch_add_instance(hopper factor_pair_${paired}_${major} factor_pair
                              "launch_factor_pair<Paired::${paired}, Major::${major}>"
                              "const FactorPair&, const SegmentBounds&, const SegmentList&")
  endforeach()
endforeach()
foreach(gathered nothing x d_y)
  anabranch_add_instance(hopper weight_gradient_${gathered} weight_gradient "launch_weight_gradient<Gathered::${gathered}>"
                            "const WeightGradient&, TileChoice, const SegmentBounds&, const SegmentList&")
endforeach()

anabranch_write_instances(hopper)
