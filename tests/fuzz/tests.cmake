# Tests that run a fuzzer under each setting of the CPU's library (`settings`), each with other cases. Seeds that have
# failed once (`seeds`) come first in all of them.
set(ANABRANCH_FUZZ_DIR ${CMAKE_CURRENT_LIST_DIR})
function(anabranch_fuzz_tests program name cases)
  file(STRINGS ${ANABRANCH_FUZZ_DIR}/settings settings)
  set(seed 1)
  foreach(setting ${settings})
    add_test(NAME ${name}.${setting} COMMAND ${program} --seeds ${ANABRANCH_FUZZ_DIR}/seeds --seed ${seed}
                                             --cases ${cases})
    set_tests_properties(${name}.${setting} PROPERTIES ENVIRONMENT ${setting})
    math(EXPR seed "${seed} + 1000000")
  endforeach()
endfunction()
