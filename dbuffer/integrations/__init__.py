"""One module for each system that takes weights. Each imports its system; nothing imports them."""
