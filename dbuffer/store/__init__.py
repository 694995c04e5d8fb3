"""A store on a filesystem: buffers, version pointer, writer, and the records of its readers."""
