"""Tools for tests with dbuffer: senders to kill, weights that show their version, fake engines."""
