"""From Python's arrays and keywords to `_C`, for numpy and for torch."""
