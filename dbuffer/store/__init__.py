"""A store on a filesystem: two buffers, the version pointer, the writer and readers' records."""
