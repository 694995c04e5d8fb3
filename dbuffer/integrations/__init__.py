"""One module for each system that takes weights. Each imports its system; the core imports none."""
