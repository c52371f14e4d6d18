# Adds one fuzzer test per environment setting of the CPU library (file `settings`), each with its own cases. All tests
# start with the seeds that once failed (file `seeds`).
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
