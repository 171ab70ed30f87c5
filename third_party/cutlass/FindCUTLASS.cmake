# Finds the headers of CUTLASS, in this order:
#
#   1. CUTLASS_DIR, as a CMake or environment variable: a CUTLASS checkout, or its include/;
#   2. the wheel nvidia-cutlass, where the Python environment of the build has it;
#   3. that wheel, fetched with pip at the version and digest that VERSION pins, without its
#      dependencies (75 MB that a C++ build has no use for), into the user's cache. The folder is
#      not the one of compiled kernels, which nobody but the user may write to, whatever the umask.
#
# Needs Python_EXECUTABLE. Sets CUTLASS_INCLUDE_DIR, CUTLASS_VERSION and the target CUTLASS::CUTLASS.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/VERSION" _pin REGEX "^nvidia-cutlass==")
string(REGEX MATCH "==(([0-9]+\\.[0-9]+\\.[0-9]+)[0-9.]*)" _ "${_pin}")
set(_pinned_wheel "${CMAKE_MATCH_1}")
set(_pinned_version "${CMAKE_MATCH_2}")
set(_subdir cutlass_library/source/include)

# Unpacks the pinned wheel's headers into the cache directory `cache`, all of them or none.
function(_cutlass_fetch cache)
  message(STATUS "CUTLASS: fetching nvidia-cutlass ${_pinned_wheel} into ${cache}")
  string(RANDOM LENGTH 8 suffix)
  set(scratch "${cache}.${suffix}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env --unset=PIP_CONSTRAINT
            "${Python_EXECUTABLE}" -m pip download --quiet --disable-pip-version-check
            --no-deps --only-binary=:all: --require-hashes
            -r "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/VERSION" -d "${scratch}"
    RESULT_VARIABLE failed ERROR_VARIABLE reason)
  if(failed)
    file(REMOVE_RECURSE "${scratch}")
    message(FATAL_ERROR
      "CUTLASS: pip cannot fetch nvidia-cutlass ${_pinned_wheel}:\n${reason}\n"
      "Without a network, set CUTLASS_DIR (CMake or environment) to a copy of CUTLASS "
      "${_pinned_version}, or install that wheel with --no-deps into the build's environment.")
  endif()
  file(GLOB wheel "${scratch}/*.whl")
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${scratch}"
       PATTERNS "${_subdir}/*" "*.dist-info/*")
  file(REMOVE "${wheel}")
  # Another build may have been first; its copy is the same.
  file(RENAME "${scratch}" "${cache}" RESULT lost)
  file(REMOVE_RECURSE "${scratch}")
endfunction()

set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A copy of CUTLASS to use in place of the pinned one")
set(CUTLASS_INCLUDE_DIR "")
if(CUTLASS_DIR)
  foreach(_dir "${CUTLASS_DIR}/include" "${CUTLASS_DIR}" "${CUTLASS_DIR}/${_subdir}")
    if(EXISTS "${_dir}/cutlass/version.h")
      set(CUTLASS_INCLUDE_DIR "${_dir}")
      break()
    endif()
  endforeach()
  if(NOT CUTLASS_INCLUDE_DIR)
    message(FATAL_ERROR "CUTLASS_DIR is ${CUTLASS_DIR}; it has no include/cutlass/version.h")
  endif()
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import importlib.metadata as m; \
d = m.distribution('nvidia-cutlass'); \
print(d.locate_file('${_subdir}') if d.version == '${_pinned_wheel}' else '')"
    OUTPUT_VARIABLE _wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_wheel AND EXISTS "${_wheel}/cutlass/version.h")
    set(CUTLASS_INCLUDE_DIR "${_wheel}")
  else()
    set(_cache "$ENV{XDG_CACHE_HOME}")
    if(NOT IS_ABSOLUTE "${_cache}")  # unset, empty, or to be ignored by the XDG specification
      file(REAL_PATH "~/.cache" _cache EXPAND_TILDE)
    endif()
    string(APPEND _cache "/cutlass_attn-build/nvidia-cutlass-${_pinned_wheel}")
    if(NOT EXISTS "${_cache}/${_subdir}/cutlass/version.h")
      _cutlass_fetch("${_cache}")
    endif()
    set(CUTLASS_INCLUDE_DIR "${_cache}/${_subdir}")
  endif()
endif()

file(STRINGS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h" _lines REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" _numbers "${_lines}")
list(JOIN _numbers "." CUTLASS_VERSION)
if(NOT CUTLASS_VERSION VERSION_EQUAL _pinned_version)
  message(WARNING "CUTLASS: ${CUTLASS_INCLUDE_DIR} is version ${CUTLASS_VERSION}; "
                  "this project is written against and tested with ${_pinned_version}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUTLASS
  REQUIRED_VARS CUTLASS_INCLUDE_DIR VERSION_VAR CUTLASS_VERSION)
if(NOT TARGET CUTLASS::CUTLASS)
  add_library(CUTLASS::CUTLASS INTERFACE IMPORTED)
  target_include_directories(CUTLASS::CUTLASS SYSTEM INTERFACE "${CUTLASS_INCLUDE_DIR}")
endif()
