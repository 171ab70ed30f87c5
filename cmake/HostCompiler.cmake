# The C++ compiler, also as nvcc's host compiler. CXX and CUDAHOSTCXX may hold more than its name:
# CXX="ccache g++ -m64" is a launcher, a compiler and arguments. CMake takes the first word for the
# compiler and gives nvcc that one alone.

# Splits a command into three lists. A word before another that is no option is a launcher;
# command_words() of backend/toolkit.py judges alike.
function(_cutlass_attn_split command launcher compiler arguments)
  set(before "")
  if(EXISTS "${command}")
    set(words "${command}")  # a path with spaces in it
  else()
    separate_arguments(words UNIX_COMMAND "${command}")
  endif()
  list(POP_FRONT words name)
  while(words)
    list(GET words 0 next)
    if(next MATCHES "^-")
      break()
    endif()
    list(APPEND before "${name}")
    list(POP_FRONT words name)
  endwhile()
  set(${launcher} "${before}" PARENT_SCOPE)
  set(${compiler} "${name}" PARENT_SCOPE)
  set(${arguments} "${words}" PARENT_SCOPE)
endfunction()

macro(cutlass_attn_enable_cxx)
  if(NOT CMAKE_CXX_COMPILER)
    _cutlass_attn_split("$ENV{CXX}" _launcher _compiler _arguments)
    if(_launcher)
      set(CMAKE_CXX_COMPILER_LAUNCHER "${_launcher}" CACHE STRING "What runs the C++ compiler")
      list(JOIN _arguments " " _arguments)
      string(STRIP "${_compiler} ${_arguments}" _command)
      set(ENV{CXX} "${_command}")
    endif()
    include(CheckLanguage)
    check_language(CXX)
    if(NOT CMAKE_CXX_COMPILER)
      message(FATAL_ERROR "No C++ compiler. Install one with C++17, e.g. `apt install g++`, "
                          "`dnf install gcc-c++` or `conda install gxx`; one off PATH goes into CXX.")
    endif()
    unset(CMAKE_CXX_COMPILER CACHE)  # check_language leaves out the arguments in CXX
    unset(CMAKE_CXX_COMPILER)
  endif()
  enable_language(CXX)
endmacro()

# Sets CMAKE_CUDA_HOST_COMPILER, and CUDAHOSTCXX for backend/toolkit.py. The compiler's arguments
# start the flags of nvcc.
macro(cutlass_attn_host_compiler)
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    if("$ENV{CUDAHOSTCXX}" STREQUAL "")
      set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
      separate_arguments(_arguments UNIX_COMMAND "${CMAKE_CXX_COMPILER_ARG1}")
    else()
      _cutlass_attn_split("$ENV{CUDAHOSTCXX}" _launcher CMAKE_CUDA_HOST_COMPILER _arguments)
    endif()
    set(_host "\"${CMAKE_CUDA_HOST_COMPILER}\"")
    foreach(_argument IN LISTS _arguments)
      string(APPEND _host " \"${_argument}\"")
      string(REPLACE "," "\\," _argument "${_argument}")  # nvcc takes a list
      string(APPEND CMAKE_CUDA_FLAGS_INIT " -Xcompiler=\"${_argument}\"")
    endforeach()
    set(ENV{CUDAHOSTCXX} "${_host}")
  endif()
endmacro()
