# Writes files that instantiate the launchers of a folder of kernels, src/experts/FAMILY (hopper, portable), and appends
# their names to INSTANCES_OF_FAMILY. Files compile in parallel. A build without optimisation spends most of its time on
# headers and on the code that instances share, so there one file has all instances of a family.
#
# anabranch_add_instance(FAMILY NAME HEADER TEMPLATE OPERANDS): an explicit instantiation of TEMPLATE, which HEADER
# defines, in the file NAME.
macro(anabranch_add_instance family name header template operands)
  if(ANABRANCH_CUDA_OPTIMIZE)
    set(file ${PROJECT_BINARY_DIR}/${family}/${name}.cu)
  else()
    set(file ${PROJECT_BINARY_DIR}/${family}/instances.cu)
  endif()
  if(NOT file IN_LIST INSTANCES_OF_${family})
    list(APPEND INSTANCES_OF_${family} ${file})
    set(includes_${file} "")
    set(instances_${file} "")
  endif()
  if(NOT includes_${file} MATCHES "/${header}\\.cuh")
    string(APPEND includes_${file} "#include \"experts/${family}/${header}.cuh\"\n")
  endif()
  string(APPEND instances_${file} "template ab_status ${template}(${operands}, int, cudaStream_t);\n")
endmacro()

# After the last instance of a family.
macro(anabranch_write_instances family)
  set(family ${family})  # an argument of a macro is no variable, which configure_file needs
  foreach(file ${INSTANCES_OF_${family}})
    set(includes "${includes_${file}}")
    set(instances "${instances_${file}}")
    configure_file(${PROJECT_SOURCE_DIR}/cmake/instance.cu.in ${file} @ONLY)
  endforeach()
endmacro()
