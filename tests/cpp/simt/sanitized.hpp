// What programs do less of under ThreadSanitizer. For sources that are compiled once, for programs
// with the sanitizer and without it.
#pragma once

extern "C" [[gnu::weak]] void __tsan_init();

// The sanitizer reports a missing synchronisation in any order of threads, and makes a run take
// five to ten times as long.
inline bool is_under_tsan() { return &__tsan_init != nullptr; }

// Of a call that runs in several orders, every other run: even runs of even calls, odd runs of odd
// calls.
inline bool is_left_out(int run, int call) { return is_under_tsan() && (run + call) % 2 != 0; }
