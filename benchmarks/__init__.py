"""How fast dbuffer is, against a plain copy in memory and against other ways through files."""
