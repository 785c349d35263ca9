"""Damaged and hostile files for everything that reads files of users: see benchmarks/fuzz.py and tests/test_fuzz.py."""
