"""Facts and file formats that the build shares with the library."""
