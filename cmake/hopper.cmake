# Writes files that instantiate the launchers of src/experts/hopper/launchers.h: one instance per file, so that they
# compile in parallel. A build without optimisation spends most of its time on headers and on the code that instances
# share, so there a file has all instances of a header.
# anabranch_hopper_instance(NAME HEADER TEMPLATE OPERANDS) adds an explicit instantiation of TEMPLATE, which HEADER
# defines. ANABRANCH_HOPPER_INSTANCES: the files.
set(ANABRANCH_HOPPER_INSTANCES "")
macro(anabranch_hopper_instance name header template operands)
  if(ANABRANCH_CUDA_OPTIMIZE)
    set(file ${PROJECT_BINARY_DIR}/hopper/${name}.cu)
  else()
    set(file ${PROJECT_BINARY_DIR}/hopper/${header}.cu)
  endif()
  if(NOT file IN_LIST ANABRANCH_HOPPER_INSTANCES)
    list(APPEND ANABRANCH_HOPPER_INSTANCES ${file})
    set(instances_${file} "")
  endif()
  set(header_${file} ${header})
  string(APPEND instances_${file} "template ab_status ${template}(${operands}, int, cudaStream_t);\n")
endmacro()

foreach(layout ungated gated interleaved)
  foreach(major mn k)
    set(arguments "GateUpLayout::${layout}, Major::${major}")
    anabranch_hopper_instance(up_${layout}_${major} up "launch_up<${arguments}>" "const Up&, TileChoice")
    anabranch_hopper_instance(intermediate_gradient_${layout}_${major} intermediate_gradient
                              "launch_intermediate_gradient<${arguments}>" "const IntermediateGradient&, TileChoice")
  endforeach()
endforeach()
foreach(major mn k)
  anabranch_hopper_instance(part_of_up_${major} up "launch_part_of_up<Major::${major}>" "const Up&, TileChoice")
  anabranch_hopper_instance(part_of_intermediate_gradient_${major} intermediate_gradient
                            "launch_part_of_intermediate_gradient<Major::${major}>"
                            "const IntermediateGradient&, TileChoice")
endforeach()
foreach(arguments "Major::mn, RowsEpilogue" "Major::k, RowsEpilogue" "Major::mn, ScaleBiasEpilogue"
                  "Major::k, ScaleBiasEpilogue")
  string(MAKE_C_IDENTIFIER "${arguments}" name)
  anabranch_hopper_instance(rows_product_${name} rows_product "launch_rows_product<${arguments}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(major mn k)
  anabranch_hopper_instance(thin_product_${major} thin_product "launch_thin_product<Major::${major}>"
                            "const RowsProduct&, TileChoice")
endforeach()
foreach(layout ungated gated interleaved)
  anabranch_hopper_instance(fp8_up_${layout} fp8_up "launch_fp8_up<GateUpLayout::${layout}>" "const Fp8Up&")
  anabranch_hopper_instance(fp8_intermediate_gradient_${layout} fp8_intermediate_gradient
                            "launch_fp8_intermediate_gradient<GateUpLayout::${layout}>" "const Fp8IntermediateGradient&")
endforeach()
foreach(epilogue RowsEpilogue ScaleBiasEpilogue)
  anabranch_hopper_instance(fp8_rows_product_${epilogue} fp8_rows_product "launch_fp8_rows_product<${epilogue}>"
                            "const Fp8RowsProduct&")
endforeach()
foreach(paired x d_y)
  foreach(major mn k)
    anabranch_hopper_instance(factor_pair_${paired}_${major} factor_pair
                              "launch_factor_pair<Paired::${paired}, Major::${major}>"
                              "const FactorPair&, const SegmentBounds&, const SegmentList&")
  endforeach()
endforeach()
foreach(gathered nothing x d_y)
  anabranch_hopper_instance(weight_gradient_${gathered} weight_gradient "launch_weight_gradient<Gathered::${gathered}>"
                            "const WeightGradient&, TileChoice, const SegmentBounds&, const SegmentList&")
endforeach()

foreach(file ${ANABRANCH_HOPPER_INSTANCES})
  set(header ${header_${file}})
  set(instances "${instances_${file}}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/hopper_instance.cu.in ${file} @ONLY)
endforeach()
