"""Tests of what is common to all inference engines; none of them needs one."""
