"""`dbuffer doctor`: probes a mount, measures between two hosts, and tries rights on a bucket."""
