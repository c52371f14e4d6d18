# Links oneDNN from the source that ANABRANCH_ONEDNN names.
function(anabranch_link_onednn target)
  if(ANABRANCH_ONEDNN STREQUAL "OFF")
    return()
  endif()
  if(ANABRANCH_ONEDNN STREQUAL "WHEEL")
    find_package(Python REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/find_onednn.py
                    OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    find_package(dnnl CONFIG REQUIRED PATHS ${wheel} NO_DEFAULT_PATH)
  else()
    find_package(dnnl CONFIG REQUIRED)
  endif()
  # gomp: oneDNN uses OpenMP threads even if this library does not, and each of its GEMMs must run on the calling
  # thread.
  target_link_libraries(${target} PRIVATE DNNL::dnnl gomp)
  target_compile_definitions(${target} PRIVATE ANABRANCH_ONEDNN)
  # lib/pythonX.Y/site-packages/anabranch/lib/libanabranch.so must find lib/libdnnl.so of the wheel onednn-cpu-gomp.
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../../..")
endfunction()
