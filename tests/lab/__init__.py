"""Stores on a real NFS server; see `lab.py`."""
