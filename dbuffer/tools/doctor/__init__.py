"""`dbuffer doctor`: probes of a mount, measurements between two hosts, and rights on a bucket."""
