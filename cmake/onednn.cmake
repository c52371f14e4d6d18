# Links the oneDNN that ANABRANCH_ONEDNN selects.
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
  # gomp: oneDNN's threads are OpenMP's also where ours are not, and each of our products must stay on its own thread.
  target_link_libraries(${target} PRIVATE DNNL::dnnl gomp)
  target_compile_definitions(${target} PRIVATE ANABRANCH_ONEDNN)
  # lib/pythonX.Y/site-packages/anabranch/lib/libanabranch.so finds lib/libdnnl.so of the wheel onednn-cpu-gomp.
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../../..")
endfunction()
