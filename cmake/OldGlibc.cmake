# A library that runs with an older glibc than that of this machine: which version of a function it
# asks for, the linker takes from the libraries that it sees. CUTLASS_ATTN_GLIBC is a folder with an
# older libc.so.6, libm.so.6 and so on; `nox -s wheels` makes one. Code need not be there, for
# nothing is copied.
set(CUTLASS_ATTN_GLIBC "" CACHE PATH "Folder of an older glibc to link with in place of the system's")

function(cutlass_attn_link_old_glibc target)
  if(NOT CUTLASS_ATTN_GLIBC)
    return()
  endif()
  set(source "${PROJECT_SOURCE_DIR}/cmake/old_libraries.cpp")
  set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(${target} PRIVATE "${source}")
  # What follows these, such as the CUDA runtime, needs them as well.
  target_link_options(${target} PRIVATE -nodefaultlibs LINKER:--no-as-needed)
  target_link_libraries(${target} PRIVATE "-L${CUTLASS_ATTN_GLIBC}" stdc++ gcc_s gcc
    -l:libm.so.6 -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1 -l:libc.so.6 c_nonshared
    -l:libld.so.2)
endfunction()
