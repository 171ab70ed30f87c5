# A Ninja job pool for kernel units, sized by the memory that is free: a kernel unit may take
# gigabytes where an ordinary one takes megabytes, and -j alone cannot tell them apart.

set(CUTLASS_ATTN_COMPILE_JOBS "" CACHE STRING
    "Kernel units compiled at the same time; empty: as many as free memory and cores allow")

# MiB of a kernel unit. Measured with nvcc 13.0: a build of tier core has no process above 450 MB;
# units that include CuTe, as Hopper's do, take 2.5 to 2.8 GB.
if(CUTLASS_ATTN_TIER STREQUAL "core" AND NOT CUTLASS_ATTN_ARCHS MATCHES "90a")
  set(_unit_mib 1000)
else()
  set(_unit_mib 3500)
endif()

# MiB that a build may take: what the machine has free, or the limit of the control group (its usage
# counts the page cache, which gives way, and is left out).
function(_free_memory result)
  cmake_host_system_information(RESULT free QUERY AVAILABLE_PHYSICAL_MEMORY)
  foreach(file /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes)
    if(EXISTS "${file}")
      file(STRINGS "${file}" limit)
      if(limit MATCHES "^[0-9]+$")
        math(EXPR limit "${limit} / 1048576")
        if(limit LESS free)
          set(free ${limit})
        endif()
      endif()
    endif()
  endforeach()
  set(${result} ${free} PARENT_SCOPE)
endfunction()

# Defines the pool cutlass_attn_units.
function(cutlass_attn_job_pool)
  set(jobs "${CUTLASS_ATTN_COMPILE_JOBS}")
  if(NOT jobs)
    _free_memory(free)
    math(EXPR jobs "${free} / ${_unit_mib}")
    if(jobs LESS 1)
      message(FATAL_ERROR
        "Compiling one kernel takes about ${_unit_mib} MiB of memory; ${free} MiB are free.\n"
        "Close other programs or add swap and set CUTLASS_ATTN_COMPILE_JOBS=1, or build without "
        "GPU kernels: CUTLASS_ATTN_CUDA=OFF and CUTLASS_ATTN_SIMT=OFF. With pip: "
        "pip install . -C cmake.define.CUTLASS_ATTN_COMPILE_JOBS=1")
    endif()
    cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
    if(cores LESS jobs)
      set(jobs ${cores})
    endif()
    message(STATUS "Kernel units: ${jobs} at a time (${free} MiB free, ${_unit_mib} each)")
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutlass_attn_units=${jobs})
endfunction()
