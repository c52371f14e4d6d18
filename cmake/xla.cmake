# Compiles the XLA FFI handlers into a library. They need the headers of jaxlib; the library does not link to jaxlib.
find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python_EXECUTABLE} -c
                        "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])"
                OUTPUT_VARIABLE JAXLIB_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

# Parsing the headers takes longer than compiling the handlers, so all handlers are one translation unit, unless
# CMAKE_UNITY_BUILD is OFF.
function(anabranch_xla_sources target)
  set(object ${target}_xla)
  add_library(${object} OBJECT ${ANABRANCH_XLA_SOURCES})
  target_include_directories(${object} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_include_directories(${object} SYSTEM PRIVATE ${JAXLIB_DIR}/include)
  target_compile_definitions(${object} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(${object} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  endif()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
endfunction()
