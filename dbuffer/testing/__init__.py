"""Tools for tests with dbuffer: killable senders, weights that show their version, fake engines."""
