# Enables the CUDA language with an nvcc that works, and finds the headers of CUDA.
#
# Which nvcc is decided by backend/toolkit.py: the machine's from CUDA 12.8 on, else that of the
# wheels of PyPI, which get laid out as a toolkit under the build directory.

set(_tool "${CMAKE_CURRENT_LIST_DIR}/../backend/toolkit.py")

macro(cutlass_attn_enable_cuda)
  # A tree of wheels that is already configured is laid out anew: the environment that it linked
  # into may have been a temporary one.
  set(_tree "${CMAKE_BINARY_DIR}/cuda_toolkit")
  cutlass_attn_host_compiler()
  cmake_path(IS_PREFIX _tree "${CMAKE_CUDA_COMPILER}" _is_laid_out)
  if(NOT CMAKE_CUDA_COMPILER OR _is_laid_out)
    execute_process(
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"  # where pip calls backend/ from
      COMMAND "${Python_EXECUTABLE}" "${_tool}" nvcc --tree "${_tree}"
      OUTPUT_VARIABLE _nvcc OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE _reason RESULT_VARIABLE _failed)
    if(_failed)
      message(FATAL_ERROR "${_reason}")
    endif()
    set(CMAKE_CUDA_COMPILER "${_nvcc}")
  endif()
  unset(ENV{CUDAHOSTCXX})  # CMake would prefer it, without its arguments
  # Targets are flags of our own: CMake's list would run the front end once for each.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc is ${CMAKE_CUDA_COMPILER} of CUDA ${CMAKE_CUDA_COMPILER_VERSION}; "
                        "12.8 or later is needed. Leave CMAKE_CUDA_COMPILER unset to have one found.")
  endif()
endmacro()

# CUDA::headers: what C++ units include. Without them the target does not exist, and
# CUTLASS_ATTN_CUDA_HEADERS_MISSING says why.
function(cutlass_attn_find_cuda_headers)
  if(CMAKE_CUDA_COMPILER_LOADED)
    set(include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    foreach(dir IN LISTS include)
      if(IS_DIRECTORY "${dir}/cccl")
        list(APPEND include "${dir}/cccl")  # CUDA 13 keeps the C++ core library there
      endif()
    endforeach()
  else()
    execute_process(
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
      COMMAND "${Python_EXECUTABLE}" "${_tool}" headers
      OUTPUT_VARIABLE include OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_VARIABLE reason ERROR_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(failed)
      set(CUTLASS_ATTN_CUDA_HEADERS_MISSING "${reason}" PARENT_SCOPE)
      return()
    endif()
  endif()
  add_library(cutlass_attn_cuda_headers INTERFACE)
  add_library(CUDA::headers ALIAS cutlass_attn_cuda_headers)
  target_include_directories(cutlass_attn_cuda_headers SYSTEM INTERFACE ${include})
endfunction()
