"""`dbuffer doctor`: probes of a mount, of the access to a bucket, and between two hosts."""
