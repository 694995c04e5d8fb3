"""Common code of all packages: checks of options, closing, retries, messages, timings."""
