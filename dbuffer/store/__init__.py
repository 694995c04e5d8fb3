"""A store on a filesystem: its two buffers, the version pointer, who writes, and who has read."""
