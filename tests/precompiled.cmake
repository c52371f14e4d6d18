# Parsing GoogleTest and the largest standard headers takes half of the compilation of a test. The programs of a folder
# that have the same options share the precompiled headers of the first one.
function(anabranch_precompile target)
  get_property(first DIRECTORY PROPERTY anabranch_first_precompiled)
  if(first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    target_precompile_headers(${target} PRIVATE <gtest/gtest.h> <algorithm> <random>)
    set_property(DIRECTORY PROPERTY anabranch_first_precompiled ${target})
  endif()
endfunction()
