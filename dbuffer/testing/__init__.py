"""Tools for tests against dbuffer: senders that die, weights that tell their version, engines."""
